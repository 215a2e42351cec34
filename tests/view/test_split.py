"""How a checkpoint of several processes is split: in text, JSON, HTML and the records; one of one process as before."""

from __future__ import annotations

import dataclasses
import json

from tests.format.indexes import index_of
from tests.leaves.documents.made_records import F32, flat
from treering._format.index import Index, LeafType
from treering._format.listing import list_index
from treering._format.records import FileRecord, LeafRecord, Listing
from treering._leaves.documents.join import join_records
from treering._values.boxes import Box
from treering._values.human import bytes_text
from treering._view.html import html_text
from treering._view.listing_json import json_lines, origin_members
from treering._view.listing_text import notes_of
from treering._view.rows import lay_out
from treering._view.tree_text import tree_lines

WIDE = LeafType(kind="jax", dtype="float32", shape=(8, 4), sharding="P('x', 'y') over x=4, y=2")
SMALL = LeafType(kind="jax", dtype="float32", shape=(3,))


def wide_index(processes: int = 4) -> Index:
    """One leaf in a grid of two boxes for each process, one whole leaf in the last file, one in odd pieces."""
    rows = 8 // processes
    files: list[list[tuple[int, Box | None]]] = []
    for process in range(processes):
        side = (process * rows, (process + 1) * rows)
        files.append([(0, (side, (0, 2))), (0, (side, (2, 4)))])
    files[-1].append((1, None))
    files[0] += [(2, ((0, 4), (0, 4))), (2, ((4, 8), (0, 2)))]
    files[1].append((2, ((4, 8), (2, 4))))
    index = index_of(["wide", "small", "odd"], [WIDE, SMALL], [0, 1, 0], files)
    data = [dataclasses.replace(file, process=number) for number, file in enumerate(index.files)]
    return dataclasses.replace(index, files=data, processes=processes)


def listing(index: Index) -> Listing:
    files = [FileRecord(name=file.name, nbytes=file.nbytes, process=file.process) for file in index.files]
    return list_index(index, form="checkpoint", files=files, file_bytes=sum(file.nbytes for file in files))


def test_records_say_how_leaves_are_split() -> None:
    root = listing(wide_index()).root
    assert (root["wide"].chunks, root["wide"].grid, root["wide"].processes) == (8, (4, 2), (0, 1, 2, 3))
    assert (root["small"].chunks, root["small"].grid, root["small"].processes) == (1, None, (3,))
    assert (root["odd"].chunks, root["odd"].grid, root["odd"].processes) == (3, None, (0, 1))


def test_text_shows_it_in_short() -> None:
    found = listing(wide_index())
    lines = list(tree_lines(lay_out(found.root), title="x", file_bytes=1, notes=notes_of(found)))
    ends = {line.split()[1]: line.split("  ")[-1].strip() for line in lines if line.startswith(("├", "└"))}
    assert ends == {"wide": "4 x 2 over processes 0-3", "small": "process 3", "odd": "3 over processes 0 and 1"}
    told = dict(notes_of(found))
    assert told["split"].startswith(f"process 0: {bytes_text(found.files[0].nbytes)} in 1 file; process 1: ")
    assert "4 processes" in told["written"]
    assert told["mesh"] == "x=2"


def test_json_has_it_in_numbers() -> None:
    found = listing(wide_index())
    origin = origin_members(found)
    document = json.loads("".join(json_lines(lay_out(found.root), origin)))
    leaves = {leaf["key"]: leaf for leaf in document["leaves"]}
    assert (leaves["wide"]["chunks"], leaves["wide"]["grid"]) == (8, [4, 2])
    assert leaves["wide"]["processes"] == [0, 1, 2, 3]
    assert (leaves["small"]["processes"], "grid" in leaves["small"]) == ([3], False)
    assert [file["process"] for file in document["files"]] == [0, 1, 2, 3]
    assert [(share["process"], share["files"]) for share in document["shares"]] == [(n, 1) for n in range(4)]
    assert sum(share["nbytes"] for share in document["shares"]) == found.file_bytes


def test_html_has_the_column() -> None:
    found = listing(wide_index())
    text = html_text(lay_out(found.root), title="x", file_bytes=1, notes=notes_of(found))
    assert "<th>chunks</th>" in text
    assert "4 x 2 over processes 0-3" in text
    assert f"<i>split</i>: process 0: {bytes_text(found.files[0].nbytes)} in 1 file" in text


def test_one_process_is_shown_as_ever() -> None:
    index = dataclasses.replace(wide_index(), processes=1)
    index = dataclasses.replace(index, files=[dataclasses.replace(file, process=None) for file in index.files])
    found = listing(index)
    assert (found.root["wide"].grid, found.root["wide"].processes, found.shares) == (None, (), ())
    lines = list(tree_lines(lay_out(found.root), title="x", file_bytes=1, notes=notes_of(found)))
    assert not any("over process" in line or "split" in line for line in lines)
    members = origin_members(found)
    assert "shares" not in members
    assert all("process" not in file for file in members["files"])  # type: ignore[attr-defined]


def test_a_very_wide_split_is_counted() -> None:
    files = tuple(
        FileRecord(name=f"data-{number}", nbytes=1000 + number, process=number)
        for number in range(1024)
        for _ in range(2)
    )
    found = Listing(form="checkpoint", file_bytes=1, root={}, files=files, processes=1024)
    told = dict(notes_of(found))["split"]
    assert told == "2,048 files by processes 0-1023, from 1.95 KiB (process 0) to 3.95 KiB (process 1023)"
    odd = LeafRecord(
        kind="jax",
        dtype="int8",
        shape=(9,),
        nbytes=9,
        offset=0,
        chunks=512,
        grid=(512,),
        processes=tuple(range(0, 1024, 2)),
    )
    (line,) = (line for line in tree_lines(lay_out({"w": odd}), title="x", file_bytes=1) if line.startswith("└"))
    assert line.endswith("512 over 512 processes")


def test_a_process_without_a_file_is_told() -> None:
    files = (FileRecord(name="data", nbytes=1000, process=1),)
    found = Listing(form="checkpoint", file_bytes=1, root={}, files=files, processes=2)
    assert dict(notes_of(found))["split"] == "process 0: no file; process 1: 1000 B in 1 file"


def test_a_leaves_directory_says_how_many_processes_saved_it() -> None:
    record = flat({"w": (F32, None)})
    for said, processes in ((None, 1), (3, 3), (True, 1), ("3", 1), (-2, 1), (0, 1)):
        written = {"by": "tests"} if said is None else {"by": "tests", "processes": said}
        index = join_records([dataclasses.replace(record, written=written)], verified=True)
        found = list_index(index, form="leaves", files=(), file_bytes=1)
        assert (found.processes, found.shares, found.root["w"].grid) == (processes, (), None)
        assert dict(notes_of(found))["written"] == ("by tests, 3 processes" if processes == 3 else "by tests")
