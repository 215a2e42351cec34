"""Indexes as listings: containers and leaves with their records, places of leaves directories, splits by processes."""

from __future__ import annotations

import dataclasses
import json
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.format.indexes import index_of, keys_of
from tests.leaves.documents.test_record import F32, flat
from treering._codec.zarr import ZarrArray
from treering._format.index import Chunks, Container, DataFile, ForeignKey, Index, LeafType, OpaqueLeaf, Token
from treering._format.listing import FileRecord, LeafRecord, Listing, Named, list_index
from treering._leaves.branches import build_listing
from treering._leaves.documents.join import join_records
from treering._leaves.documents.record import OpenBranch
from treering._values.boxes import Box
from treering._values.human import bytes_text
from treering._values.outline import outline_html
from treering._view.listings import json_lines, leaf_members, notes_of, origin_members, tree_outline
from treering._view.rows import branch_kind, lay_out, leaves_of
from treering._view.tree_text import UNICODE, tree_lines
from treering.errors import CorruptError

INT = LeafType(kind="int")
ARRAY = LeafType(kind="jax", dtype="bfloat16", shape=(2, 3), sharding="P('x')")
TEXT = LeafType(kind="str", dtype="uint8", shape=(5000,))


def index(structure: Sequence[Token], types: Sequence[LeafType], *, verified: bool = True) -> Index:
    """Make an index with one chunk for each stored leaf."""
    kinds = list(dict.fromkeys(types))
    stored = [number for number, kind in enumerate(types) if kind.stored]
    return Index(
        attempt="0" * 16,
        written={"by": "treering"},
        processes=1,
        meshes=("x=8 on 8 cpu devices",),
        structure=structure,
        keys=[str(number) for number in range(len(types))],
        types=kinds,
        leaf_types=[kinds.index(kind) for kind in types],
        values={number: number for number, kind in enumerate(types) if not kind.stored},
        chunks=Chunks(
            leaf=stored,
            box=[None] * len(stored),
            file=[0] * len(stored),
            offset=[4096 + 100 * number for number in stored],
            nbytes=[12] * len(stored),
            block=[65536] * len(stored),
        ),
        checksums=array("Q"),
        files=[DataFile(name="data", nbytes=5000, header=4096, digest=None)],
        replaces=(),
        metadata={},
        verified=verified,
    )


def listing(structure: Sequence[Token], types: Sequence[LeafType], *, verified: bool = True) -> Listing:
    return list_index(index(structure, types, verified=verified), form="checkpoint", files=(), file_bytes=1)


def container(node: str, *keys: Any, class_name: str | None = None) -> Container:
    return Container(node=node, keys=keys, class_name=class_name)


def test_containers_come_back_as_they_were() -> None:
    structure: list[Token] = [
        container("dict", "a", 5, "t"),
        container("list", 0, 1),
        1,
        container("dict"),
        1,
        container("tuple", 0, 1),
        container("namedtuple", "count", class_name="optax.State"),
        1,
        container("other", "w", class_name="nn.Dense"),
        1,
    ]
    root = listing(structure, [INT] * 4).root
    assert root == {"a": [0, {}], 5: 1, "t": ({"count": 2}, {"w": 3})}
    named, other = root["t"]
    assert isinstance(named, Named)
    assert (branch_kind(named), named.class_name) == ("namedtuple", "optax.State")
    assert (branch_kind(other), other.class_name) == ("other", "nn.Dense")


def test_leaves_have_their_records() -> None:
    root = listing([container("list", 0, 1, 2), 3], [ARRAY, INT, TEXT]).root
    assert root[0] == LeafRecord(
        kind="jax", dtype="bfloat16", shape=(2, 3), nbytes=12, offset=4096, file="data", sharding="P('x')", number=0
    )
    assert root[1] == 1
    assert (root[2].kind, root[2].dtype, root[2].shape, root[2].nbytes) == ("str", None, None, 5000)


def test_a_file_of_another_writer_says_less() -> None:
    found = listing([1], [ARRAY], verified=False)
    assert found.root.kind == "array"
    assert found.root.is_array
    assert not found.structured


def test_one_leaf_is_the_root() -> None:
    assert listing([1], [INT]).root == 0


@pytest.mark.parametrize(
    ("structure", "count"),
    [
        ([], 1),
        ([2], 2),
        ([1, 1], 2),
        ([container("list", 0, 1), 1], 1),
        ([container("list", 0), 2], 2),
        ([container("list", 0), 1], 2),
        ([container("list", 0), 1], 0),
        ([container("dict"), container("dict")], 0),
        ([container("dict", 1, True), 2], 2),
    ],
)
def test_a_structure_that_does_not_fit_is_damage(structure: list[Token], count: int) -> None:
    with pytest.raises(CorruptError):
        listing(structure, [INT] * count)


def test_a_thousand_levels() -> None:
    structure: list[Token] = [container("list", 0) for _ in range(1024)]
    node = listing([*structure, 1], [INT]).root
    for _ in range(1024):
        (node,) = node
    assert node == 0


names: st.SearchStrategy[Any] = (
    st.text(max_size=3) | st.integers(-3, 3) | st.booleans() | st.none() | st.binary(max_size=2)
)
names |= st.builds(ForeignKey, st.just("a.B"), st.text(max_size=2))


@st.composite
def structures(draw: st.DrawFn) -> tuple[list[Token], int]:
    def grow(levels: int) -> tuple[list[Token], int]:
        if not levels or draw(st.booleans()):
            return [1], 1
        node = draw(st.sampled_from(["dict", "list", "tuple", "namedtuple", "other"]))
        keys = draw(st.lists(names, max_size=3, unique_by=str))
        if node != "dict":
            keys = list(range(len(keys))) if node in {"list", "tuple"} else [f"f{n}" for n in range(len(keys))]
        elif len(set(keys)) != len(keys):
            keys = []
        tokens: list[Token] = [container(node, *keys, class_name="a.B")]
        leaves = 0
        for _ in keys:
            below, count = grow(levels - 1)
            leaves += count
            if isinstance(below[0], int) and isinstance(tokens[-1], int):
                tokens[-1] += below[0]
            else:
                tokens += below
        return tokens, leaves

    return grow(3)


@given(structures())
def test_key_texts_are_those_of_the_index(made: tuple[list[Token], int]) -> None:
    structure, count = made
    root = listing(structure, [INT] * count).root
    assert [key for key, _ in leaves_of(root)] == keys_of(structure)
    assert [leaf for _, leaf in leaves_of(root)] == list(range(count))


def test_json_names_classes_and_what_is_known_of_the_whole() -> None:
    import json

    found = listing([container("dict", "opt"), container("namedtuple", "n", class_name="optax.State"), 1], [ARRAY])
    lines = json_lines(lay_out(found.root), origin_members(found))
    document = json.loads("".join(lines))
    assert document["nodes"] == [{"key": "opt", "kind": "namedtuple", "class": "optax.State"}]
    assert (document["form"], document["verified"], document["meshes"]) == ("checkpoint", True, list(found.meshes))
    assert document["leaves"][0]["sharding"] == "P('x')"


def test_an_opaque_leaf_is_shown_by_its_text() -> None:
    made = index([1], [LeafType(kind="opaque")])
    made.values[0] = OpaqueLeaf("builtins.function", "gelu")  # type: ignore[index]
    root = list_index(made, form="checkpoint", files=(), file_bytes=1).root
    assert root == OpaqueLeaf("builtins.function", "gelu")
    assert lay_out(root).everything.nbytes == 0


PLAIN = ZarrArray(shape=(2, 3), chunks=(1, 1), dtype="bfloat16")
ZIPPED = ZarrArray(shape=(5000,), chunks=(5000,), dtype="uint8", compressor='{"id":"zstd","level":1}')


def leaves_listing() -> Listing:
    found = index([container("dict", "a", "n", "b", "c"), 4], [ARRAY, INT, TEXT, ARRAY])
    ours: Any = SimpleNamespace(folders=["a", "b"], prefix=None)
    theirs: Any = SimpleNamespace(folders=["c"], prefix=None)
    branches = [
        OpenBranch(record=ours, arrays=[PLAIN, ZIPPED], attempt=None, verified=True),
        OpenBranch(record=theirs, arrays=[PLAIN], attempt=None, verified=False),
    ]
    return dataclasses.replace(build_listing(found, branches), prefixes=(), unverified=())


def test_every_stored_leaf_has_its_place() -> None:
    leaves = dict(leaves_of(leaves_listing().root))
    assert leaves["n"] == 1
    a, b, c = (leaves[key] for key in "abc")
    assert (a.kind, a.file, a.offset, a.chunks, a.chunk_shape, a.compressor) == ("jax", "a/0.0", 0, 6, (1, 1), None)
    # What is compressed lies at no offset.
    assert (b.kind, b.dtype, b.file, b.offset, b.compressor) == ("str", None, "b/0", None, ZIPPED.compressor)
    assert (c.kind, c.file) == ("array", "c/0.0")


def test_chunks_stand_last_where_there_is_room() -> None:
    lines = list(tree_lines(lay_out(leaves_listing().root), title="x", file_bytes=1))
    assert lines[1].endswith("  sharding  chunks")
    assert lines[2].endswith("  P('x')    6 of [1, 1]")
    assert lines[4].endswith(" " * 10 + "zstd")
    narrow = dataclasses.replace(UNICODE, width=60)
    lines = list(tree_lines(lay_out(leaves_listing().root), title="x", file_bytes=1, style=narrow))
    assert not any("chunks" in line or "P('x')" in line for line in lines)
    assert "6 of [1, 1]" in outline_html(tree_outline(leaves_listing().root, title="x"))


def test_programs_get_shape_and_configuration() -> None:
    leaves = {key: leaf_members(key, leaf) for key, leaf in leaves_of(leaves_listing().root)}
    assert (leaves["a"]["chunks"], leaves["a"]["chunk_shape"], leaves["a"]["compressor"]) == (6, (1, 1), None)
    assert leaves["b"]["compressor"] == {"id": "zstd", "level": 1}
    assert "chunks" not in leaves["b"]
    assert "chunk_shape" not in leaves["n"]
    plain = LeafRecord(kind="jax", dtype="int8", shape=(1,), nbytes=1, offset=0)
    assert "chunk_shape" not in leaf_members("w", plain)


def test_prefixes_of_others_are_told() -> None:
    found = dataclasses.replace(leaves_listing(), verified=False, prefixes=("model", "ema", ""), unverified=("ema", ""))
    assert origin_members(found)["prefixes"] == ("model", "ema", "")
    assert origin_members(found)["unverified"] == ("ema", "")
    notes = dict(notes_of(found))
    assert notes["form"] == "leaves directory by treering and others, with checksums of some leaves"
    assert notes["unverified"] == "'ema', no prefix: written by another program, without checksums"
    many = dataclasses.replace(found, prefixes=[str(n) for n in range(30)], unverified=[str(n) for n in range(20)])
    assert " and 12 more: " in dict(notes_of(many))["unverified"]


def test_where_all_are_alike_the_form_says_it() -> None:
    foreign = dataclasses.replace(leaves_listing(), verified=False, prefixes=("a", "b"), unverified=("a", "b"))
    assert notes_of(foreign)[0] == ("form", "leaves directory, without checksums")
    assert "unverified" not in dict(notes_of(foreign))
    ours = dataclasses.replace(leaves_listing(), verified=True, prefixes=("",), notes=("a save is not indexed",))
    assert notes_of(ours)[:2] == [
        ("form", "leaves directory by treering, with checksums"),
        ("note", "a save is not indexed"),
    ]
    assert "prefixes" not in origin_members(Listing(form="checkpoint", file_bytes=1, root={}))
    assert json.loads(json.dumps(origin_members(ours)))["unverified"] == []


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


def split_listing(index: Index) -> Listing:
    files = [FileRecord(name=file.name, nbytes=file.nbytes, process=file.process) for file in index.files]
    return list_index(index, form="checkpoint", files=files, file_bytes=sum(file.nbytes for file in files))


def test_records_say_how_leaves_are_split() -> None:
    root = split_listing(wide_index()).root
    assert (root["wide"].chunks, root["wide"].grid, root["wide"].processes) == (8, (4, 2), (0, 1, 2, 3))
    assert (root["small"].chunks, root["small"].grid, root["small"].processes) == (1, None, (3,))
    assert (root["odd"].chunks, root["odd"].grid, root["odd"].processes) == (3, None, (0, 1))


def test_text_shows_it_in_short() -> None:
    found = split_listing(wide_index())
    lines = list(tree_lines(lay_out(found.root), title="x", file_bytes=1, notes=notes_of(found)))
    ends = {line.split()[1]: line.split("  ")[-1].strip() for line in lines if line.startswith(("├", "└"))}
    assert ends == {"wide": "4 x 2 over processes 0-3", "small": "process 3", "odd": "3 over processes 0 and 1"}
    told = dict(notes_of(found))
    assert told["split"].startswith(f"process 0: {bytes_text(found.files[0].nbytes)} in 1 file; process 1: ")
    assert "4 processes" in told["written"]
    assert told["mesh"] == "x=2"


def test_json_has_it_in_numbers() -> None:
    found = split_listing(wide_index())
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
    found = split_listing(wide_index())
    text = outline_html(tree_outline(found.root, title="x", notes=notes_of(found)))
    assert "chunks</span>" in text
    assert "4 x 2 over processes 0-3" in text
    assert f"<i>split</i>: process 0: {bytes_text(found.files[0].nbytes)} in 1 file" in text


def test_one_process_is_shown_as_ever() -> None:
    index = dataclasses.replace(wide_index(), processes=1)
    index = dataclasses.replace(index, files=[dataclasses.replace(file, process=None) for file in index.files])
    found = split_listing(index)
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
