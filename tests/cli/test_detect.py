"""What stands at a path, told by its content."""

from __future__ import annotations

import gzip
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering
from tests.cli.trees import in_every_form
from tests.command import here
from treering import serialization
from treering.errors import CorruptError, FormatError, NotFoundError, StoreError, UnsupportedError

FORMS = {
    "checkpoint": "checkpoint",
    "safetensors": "safetensors",
    "foreign": "safetensors",
    "msgpack": "msgpack",
    "gzip": "msgpack in gzip",
}
# What only the reader of a form says of a file or folder that is damaged.
REFUSALS = {
    "checkpoint": r"treering\.json' is damaged|treering\.json is damaged|it has no 'treering\.json'",
    "leaves": r"tensorstore_index\.json' is not JSON|there is no leaves directory in",
    "safetensors": r"a safetensors file has at least|a header of \d+ bytes|the header does not begin",
    "msgpack": r"the input is empty|follow the end of the tree",
}


def form_of(path: str | Path) -> str:
    """Return the form that treering takes this for; a damaged one shows it by what its reader says."""
    try:
        return treering.inspect(path).form
    except (CorruptError, NotFoundError) as error:
        (form,) = [form for form, words in REFUSALS.items() if re.search(words, str(error))]
        return form


def test_the_content_decides_whatever_the_name(tmp_path: Path) -> None:
    for name, path in in_every_form(tmp_path).items():
        other = path.rename(tmp_path / f"{name}.bin")
        assert form_of(other) == FORMS[name]
        assert form_of(str(other)) == FORMS[name]


def test_a_link_to_a_checkpoint_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(in_every_form(tmp_path)["checkpoint"], target_is_directory=True)
    assert form_of(tmp_path / "link") == "checkpoint"


@pytest.mark.parametrize("content", [b"", b"\x01", b"\xff" * 7, b"\xff" * 100, bytes(20)])
def test_a_damaged_file_goes_to_the_reader_of_its_suffix(tmp_path: Path, content: bytes) -> None:
    for suffix, form in ((".safetensors", "safetensors"), (".msgpack", "msgpack")):
        path = tmp_path / f"file{suffix}"
        path.write_bytes(content)
        assert form_of(path) == form


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (pickle.dumps([1]), "a pickle"),
        (b"GGUF\x03", "a GGUF file"),
        (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
        (json.dumps({"a": 1}).encode(), "a JSON text"),
    ],
)
def test_other_forms_are_named(tmp_path: Path, content: bytes, wanted: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=wanted):
        treering.inspect(path)
    # Inside gzip nothing is told apart but what holds no array.
    path.write_bytes(gzip.compress(content))
    found = (CorruptError, "bytes follow") if content[0] & 0x80 else (FormatError, "in no form")
    with pytest.raises(found[0], match=found[1]):
        treering.inspect(path)


VERBS: dict[str, Callable[..., Any]] = {
    "load": treering.load,
    "load a part": lambda path: treering.load(path, at="a"),
    "load into like": lambda path: treering.load(path, like=1),
    "open": treering.open,
    "verify": treering.verify,
    "inspect": treering.inspect,
    "diff": lambda path: treering.diff(path, path),
    "cat": lambda path: here("cat", str(path), "**", code=2),
    "ls": lambda path: here("ls", str(path), code=2),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("stride", [51, pytest.param(13, marks=pytest.mark.slow)])
@pytest.mark.parametrize("verb", VERBS)
def test_a_bare_number_or_text_is_no_checkpoint(tmp_path: Path, verb: str, stride: int) -> None:
    for number, data in enumerate(
        (
            b"\n",
            # Each verb has other first bytes.
            *(bytes([first]) for first in range(list(VERBS).index(verb) % stride, 256, stride)),
            b"1",
            *map(serialization.msgpack_serialize, (2.5, "a", b"b", 2**40)),
        )
    ):
        if data and data[0] in {*range(0x80, 0xA0), *range(0xC7, 0xCA), *range(0xD4, 0xD9), *range(0xDC, 0xE0)}:
            continue
        for name, content in ((f"f{number}", data), (f"f{number}.gz", gzip.compress(data))):
            (tmp_path / name).write_bytes(content)
            if verb in ("cat", "ls"):
                assert "is in no form that treering reads" in VERBS[verb](tmp_path / name).stderr
                continue
            with pytest.raises(FormatError, match="is in no form that treering reads"):
                VERBS[verb](tmp_path / name)


def test_a_bare_number_in_a_file_that_is_called_msgpack_loads(tmp_path: Path) -> None:
    treering.save(tmp_path / "step.msgpack", 10)
    (tmp_path / "step.msgpack.gz").write_bytes(gzip.compress(b"\x0a"))
    assert treering.load(tmp_path / "step.msgpack") == treering.load(tmp_path / "step.msgpack.gz") == 10


def test_the_index_alone_leads_to_its_folder(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="pass the folder"):
        treering.inspect(in_every_form(tmp_path)["checkpoint"] / "treering.json")


@pytest.mark.parametrize("name", ["manifest.ocdbt", "_CHECKPOINT_METADATA", ".zarray"])
def test_folders_of_others_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(NotFoundError, match="there is no checkpoint"):
        treering.inspect(tmp_path)


@pytest.mark.parametrize("name", ["tensorstore_index.json", ".treering/x", "a/.zarray", "a/b/c/.zarray"])
def test_a_folder_of_leaves(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"")
    assert form_of(tmp_path) == "leaves"
    # Both in one folder: that the files of a checkpoint are there was meant for a checkpoint.
    (tmp_path / "treering.json").write_bytes(b"")
    assert form_of(tmp_path) == "checkpoint"


def test_inside_of_leaves_the_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "model" / "w").mkdir(parents=True)
    (tmp_path / "model" / "w" / ".zarray").write_bytes(b"")
    index = tmp_path / "tensorstore_index.json"
    index.write_bytes(b'{\n  "format": "tensorstore"}')
    for inside in ("model", "model/w"):
        with pytest.raises(NotFoundError, match="inside of a leaves directory"):
            treering.inspect(tmp_path / inside)
    with pytest.raises(FormatError) as caught:
        treering.inspect(index)
    assert caught.value.hint == "pass the folder that it is in"
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "treering.json").write_bytes(b"")
    assert form_of(tmp_path / "checkpoint") == "checkpoint"


def test_links_lead_to_no_leaves(tmp_path: Path) -> None:
    (tmp_path / "far" / "a").mkdir(parents=True)
    (tmp_path / "far" / "a" / ".zarray").write_bytes(b"")
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "link").symlink_to(tmp_path / "far", target_is_directory=True)
    assert form_of(tmp_path / "near") == "checkpoint"
    assert form_of(tmp_path / "far") == "leaves"


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        treering.inspect(tmp_path / "nope")
    with pytest.raises(StoreError):
        treering.inspect(tmp_path / "a\0b")
    with pytest.raises(UnsupportedError, match="URL"):
        treering.inspect("hf://bucket/checkpoint")
    assert not list(tmp_path.iterdir())


def test_the_first_bytes_of_a_header_are_enough(tmp_path: Path) -> None:
    path = tmp_path / "cut"
    path.write_bytes((1000).to_bytes(8, "little") + b"{")
    assert form_of(path) == "safetensors"
    np.save(tmp_path / "a.npy", np.zeros(3))
    assert form_of(tmp_path / "a.npy") == "npy"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (b"hello\n", "it looks like text"),
        (b"import os\n", "it looks like text"),
        ("\N{LATIN CAPITAL LETTER A WITH DIAERESIS}pfel".encode(), "it looks like text"),
        ("\N{BYTE ORDER MARK}a,b\r\n1,2\r\n".encode(), "it looks like text"),
        (("\N{CYRILLIC SMALL LETTER DE}" * 20).encode(), "it looks like text"),
        (b"", "it is empty"),
        (bytes(20), "a bare value is msgpack only in a file with the suffix .msgpack"),
        (b"\xff" * 100, "a bare value is msgpack only in a file with the suffix .msgpack"),
    ],
    ids=repr,
)
def test_what_is_of_no_form_is_not_called_damaged(tmp_path: Path, content: bytes, hint: str | None) -> None:
    path = tmp_path / "file.txt"
    path.write_bytes(content)
    for refusing in (treering.load, treering.open, treering.inspect, treering.verify):
        with pytest.raises(FormatError, match="in no form that treering reads") as caught:
            refusing(path)
        assert caught.value.hint == hint
    with pytest.raises(CorruptError):
        serialization.load_from_file(None, path)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "value", [0, 127, -32, -1, 128, 2**16, 2**40, -(2**31), 1.5, True, None, "", "text", b"x", [], {}]
)
def test_every_value_of_msgpack_alone_is_msgpack_where_it_is_called_so(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "file.msgpack"
    path.write_bytes(serialization.msgpack_serialize(value))
    assert form_of(path) == "msgpack"
    other = tmp_path / "file.bin"
    other.write_bytes(path.read_bytes())
    if isinstance(value, list | dict):
        assert form_of(other) == "msgpack"
    else:
        with pytest.raises(FormatError, match="in no form"):
            treering.inspect(other)
    # Cut short it is damaged, not of another form.
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptError):
        treering.inspect(path)


def test_a_wrong_path_names_the_nearest_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(in_every_form(tmp_path)["checkpoint"].parent)
    for refusing in (treering.load, treering.open, treering.inspect, treering.verify):
        with pytest.raises(NotFoundError, match="did you mean 'checkpoint'"):
            refusing("chekpoint")
    with pytest.raises(NotFoundError, match="did you mean 'checkpoint'"):
        treering.inspect("Checkpiont/step_1/more")
    with pytest.raises(NotFoundError, match=f"did you mean '{tmp_path}/state.msgpack'"):
        treering.inspect(tmp_path / "stat.msgpack")
    with pytest.raises(NotFoundError) as caught:
        treering.inspect("zzzzzz")
    assert caught.value.hint == f"the folder '{tmp_path}' has nothing named 'zzzzzz'"


def test_a_path_that_is_not_there_is_told_with_where_it_stops_being_there(tmp_path: Path) -> None:
    for refusing in (treering.load, treering.open, treering.inspect, treering.verify):
        with pytest.raises(NotFoundError) as caught:
            refusing(tmp_path / "lost" / "run" / "7")
        assert caught.value.hint == f"the folder '{tmp_path}' has nothing named 'lost'"


def test_a_link_to_what_is_not_there_does_not_suggest_itself(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("gone")
    for path in (tmp_path / "latest", tmp_path / "latest" / "params"):
        for refusing in (treering.load, treering.open, treering.inspect, treering.verify):
            with pytest.raises(NotFoundError) as caught:
                refusing(path)
            assert caught.value.hint == f"'{tmp_path}/latest' is a link to '{tmp_path}/gone', which is not there"


def test_a_base_that_is_not_there_is_told_with_the_name_that_is_like_it(tmp_path: Path) -> None:
    treering.save(tmp_path / "step_1", {"a": 1})
    with pytest.raises(NotFoundError, match=f"base=: could not read .*; did you mean '{tmp_path}/step_1'"):
        treering.save(tmp_path / "step_2", {"a": 2}, base=tmp_path / "stp_1")


@pytest.mark.parametrize("path", ["~/checkpoint", "~", "~somebody/x"])
def test_a_tilde_is_not_expanded(path: str) -> None:
    with pytest.raises(NotFoundError, match=r"os\.path\.expanduser"):
        treering.load(path)


@pytest.mark.parametrize("path", ["", b"checkpoint"])
def test_what_is_no_path(path: Any) -> None:
    for refusing in (treering.load, treering.open, treering.inspect, treering.verify):
        with pytest.raises(UnsupportedError, match=r"is not the name of a checkpoint|is the path"):
            refusing(path)


def test_a_tree_in_the_place_of_a_path_is_not_printed() -> None:
    tree: Any = {"a": list(range(1000))}
    for refusing in (treering.inspect, treering.verify, lambda path: treering.diff(path, path)):
        with pytest.raises(
            UnsupportedError, match=r"^a dict is not the name of a checkpoint or file; pass the path of one, as text$"
        ):
            refusing(tree)


def test_a_text_is_told_from_damage_also_under_the_name_of_arrays(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:aaa\nsize 12\n"
    for name in ("a.safetensors", "a.msgpack"):
        path = tmp_path / name
        for content, hint in ((b"<html>{404 not found</html>", "it looks like text"), (pointer, "git lfs pull")):
            path.write_bytes(content)
            for refusing in (treering.load, treering.open, treering.inspect, treering.verify):
                with pytest.raises(FormatError, match="in no form that treering reads") as caught:
                    refusing(path)
                assert hint in str(caught.value.hint)
    path = tmp_path / "a.safetensors"
    path.write_bytes(serialization.msgpack_serialize({"a": 1, "long": "b" * 20}))
    assert treering.load(path) == {"a": 1, "long": "b" * 20}
    for content in (pickle.dumps(["a" * 20]), b"GGUF\x03" + bytes(20)):
        path.write_bytes(content)
        with pytest.raises(FormatError, match=r"a pickle|a GGUF file"):
            treering.load(path)
    (tmp_path / "model.safetensors").write_bytes(pointer)
    with pytest.raises(FormatError, match=r"is not a safetensors file; .*git lfs pull"):
        treering.load(tmp_path)


def test_a_safetensors_file_that_is_cut_or_struck_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    treering.save(path, {"a": np.arange(300)})
    whole = path.read_bytes()
    for size in (*range(20), 100):
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptError):
            treering.load(path)
    for bit in range(9 * 8):
        path.write_bytes((int.from_bytes(whole, "little") ^ 1 << bit).to_bytes(len(whole), "little"))
        with pytest.raises(CorruptError):
            treering.load(path)
