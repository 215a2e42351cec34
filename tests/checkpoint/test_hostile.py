"""An index whose digest is right and whose content is not: every lie ends in an error of ours, for every reader."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import treering
from tests.checkpoint.documents import Document, document_of, rewrite, sample, signed, signed_text
from treering.errors import CorruptError, FormatError, NotFoundError, TreeringError, UnsupportedError

Change = Callable[[Document], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample(tmp_path_factory.mktemp("hostile") / "ckpt")


@pytest.fixture
def ckpt(whole: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    copy = tmp_path / "ckpt"
    copy.mkdir()
    for file in whole.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def at(path: str, value: Any) -> Change:
    """A change that puts ``value`` at a place such as ``chunks/offset/0``."""

    def change(document: Document) -> None:
        *way, last = [int(part) if part.lstrip("-").isdigit() else part for part in path.split("/")]
        node: Any = document
        for part in way:
            node = node[part]
        if callable(value):
            node[last] = value(node[last])
        else:
            node[last] = value

    return change


def without(path: str) -> Change:
    """A change that takes a member or an item away."""

    def change(document: Document) -> None:
        *way, last = [int(part) if part.isdigit() else part for part in path.split("/")]
        node: Any = document
        for part in way:
            node = node[part]
        del node[last]

    return change


def chunk_of(document: Document, key: str) -> int:
    """The number of the first chunk of a leaf."""
    return document["chunks"]["leaf"].index(document["leaves"]["key"].index(key))


def in_chunk(key: str, column: str, value: Any, step: int = 0) -> Change:
    """A change to the row of a leaf's chunk."""

    def change(document: Document) -> None:
        cells = document["chunks"][column]
        number = chunk_of(document, key) + step
        cells[number] = value(cells[number]) if callable(value) else value

    return change


def in_type(key: str, name: str, value: Any) -> Change:
    """A change to the type of a leaf."""

    def change(document: Document) -> None:
        document["types"][document["leaves"]["type"][document["leaves"]["key"].index(key)]][name] = value

    return change


def nested(levels: int) -> Any:
    """Lists in each other."""
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


MEMBERS = (
    "attempt",
    "written",
    "processes",
    "meshes",
    "structure",
    "types",
    "leaves",
    "values",
    "chunks",
    "checksums",
    "files",
    "replaces",
    "metadata",
)
NOT_WHOLE: tuple[Any, ...] = (-1, 1.0, True, None, "1", 2**63, 2**62, -(2**70), 10**400, [1], {})

CASES: dict[str, Change] = {
    # Names that lead elsewhere.
    "an absolute name": at("files/0/name", "/etc/passwd"),
    "a name with ..": at("files/0/name", "../data.safetensors"),
    "a name below": at("files/0/name", "below/data.safetensors"),
    "a Windows name": at("files/0/name", "C:\\data.safetensors"),
    "a name with a NUL": at("files/0/name", "data\0.safetensors"),
    "an empty name": at("files/0/name", ""),
    "the index itself": at("files/0/name", "treering.json"),
    "a name with a line feed": at("files/0/name", lambda name: name + "\n"),
    "a foreign file": at("files/0/name", "model.safetensors"),
    "a process that is none": at("files/0", lambda file: file | {"process": 1}),
    "a negative process": at("files/0", lambda file: file | {"process": -1}),
    "a process that is not a number": at("files/0", lambda file: file | {"process": True}),
    "a process that is null": at("files/0", lambda file: file | {"process": None}),
    "a name twice": at("files", lambda files: files * 2),
    "a replaced name that leads elsewhere": at("replaces", ["../../precious"]),
    "a replaced file that is in use": lambda document: document["replaces"].append(document["files"][0]["name"]),
    # Ranges in files.
    "an overlap": in_chunk("large", "offset", lambda offset: offset - 64),
    "a gap": in_chunk("large", "offset", lambda offset: offset + 64),
    "a range in the header": in_chunk("large", "offset", 0),
    "a range behind the end": in_chunk("large", "offset", 2**50),
    "a longer range": in_chunk("large", "nbytes", lambda nbytes: nbytes + 8),
    "a shorter range": in_chunk("large", "nbytes", lambda nbytes: nbytes - 8),
    "two gigabytes more": in_chunk("large", "nbytes", 2 << 30),
    "a file of a terabyte": at("files/0/nbytes", 1 << 40),
    "a shorter file": at("files/0/nbytes", lambda nbytes: nbytes - 1),
    "an empty array inside another": in_chunk("empty", "offset", lambda offset: offset + 1),
    "two leaves in one place": lambda document: document["chunks"]["offset"].__setitem__(
        chunk_of(document, "a"), document["chunks"]["offset"][chunk_of(document, "divided")]
    ),
    "a header that is not a whole page": at("files/0/header", 8),
    "a header beyond the file": at("files/0/header", 1 << 40),
    "no header": at("files/0/header", 0),
    # Shapes and dtypes.
    "an absurd shape": in_type("a", "shape", [2**62, 3]),
    "an absurd shape of nothing": in_type("empty", "shape", [0, 2**62]),
    "a shape of a million axes": in_type("a", "shape", [1] * 10**6),
    "a negative length": in_type("a", "shape", [-2, -3]),
    "a float length": in_type("a", "shape", [2.0, 3]),
    "a bool length": in_type("a", "shape", [True, 6]),
    "a transposed shape of another size": in_type("a", "shape", [3, 3]),
    "no shape": in_type("a", "shape", None),
    "an unknown dtype": in_type("a", "dtype", "float7"),
    "an object dtype": in_type("a", "dtype", "object"),
    "a structured dtype": in_type("a", "dtype", "i4,f8"),
    "another byte order": in_type("a", "dtype", ">i4"),
    "an unknown kind": in_type("a", "kind", "tensor"),
    "a wider dtype": in_type("a", "dtype", "int64"),
    "a key without an implementation": in_type("tuple/1", "impl", None),
    "text of two axes": in_type("text", "shape", [50, 100]),
    "text of floats": in_type("text", "dtype", "float32"),
    # Boxes.
    "boxes that overlap": in_chunk("divided", "box", [[0, 2], [0, 4]], 1),
    "a box outside of its leaf": in_chunk("divided", "box", [[8, 10], [0, 4]]),
    "an inverted box": in_chunk("divided", "box", [[2, 0], [4, 0]]),
    "a box of one axis": in_chunk("divided", "box", [[0, 8]]),
    "a box that is a number": in_chunk("divided", "box", 8),
    "a box of text": in_chunk("divided", "box", ["ab", "cd"]),
    "a box of floats": in_chunk("divided", "box", [[0, 2.0], [0, 4]]),
    "a box of bools": in_chunk("divided", "box", [[False, 2], [0, 4]]),
    "a whole among the parts": in_chunk("divided", "box", None),
    "a huge box": in_chunk("divided", "box", [[0, 2**62], [0, 2**62]]),
    # Columns.
    "a column that is shorter": at("chunks/offset", lambda column: column[:-1]),
    "chunks of another order": at("chunks/leaf", lambda column: column[::-1]),
    "a chunk of no leaf": at("chunks/leaf/0", 10**6),
    "a chunk of a Python leaf": lambda document: document["chunks"]["leaf"].__setitem__(
        0, document["leaves"]["key"].index("list/0")
    ),
    "a chunk of no file": at("chunks/file/0", 1),
    "an unknown codec": at("chunks/codec", "zstd"),
    "a small block": at("chunks/block/0", 1),
    "a block of zero": at("chunks/block/0", 0),
    "a block that is not a power of two": at("chunks/block/0", 65537),
    "a huge block": at("chunks/block/0", 1 << 40),
    "one checksum less": at("checksums/table", lambda table: base64.b64encode(base64.b64decode(table)[:-8]).decode()),
    "half a checksum": at("checksums/table", "AAAA"),
    "not base64": at("checksums/table", "?"),
    "another algorithm": at("checksums/algorithm", "crc32"),
    "a type too many": at("leaves/type", lambda types: [*types, 0]),
    "a type of no number": at("leaves/type/0", 999),
    # Structure and keys.
    "another key": at("leaves/key/0", "b"),
    "a key twice": at("leaves/key/0", "divided"),
    "keys of other leaves": at("leaves/key", lambda keys: keys[::-1]),
    "a key that is a number": at("leaves/key/0", 1),
    "an empty structure": at("structure", []),
    "a token of zero": at("structure", lambda tokens: [*tokens, 0]),
    "a token of a negative number": at("structure", lambda tokens: [*tokens, -1]),
    "a token of a huge number": at("structure/1", 2**62),
    "a token of text": at("structure/1", "4"),
    "a token of true": at("structure/1", True),
    "a token too many": at("structure", lambda tokens: [*tokens, {"node": "dict", "keys": []}]),
    "a second tree": at("structure", lambda tokens: [*tokens, *tokens]),
    "an unknown container": at("structure/0/node", "set"),
    "a container without a kind": without("structure/0/node"),
    "a key of a container twice": at("structure/0/keys/1", "a"),
    "a key of an unknown form": at("structure/0/keys/0", {"set": []}),
    "a key of two forms": at("structure/0/keys/0", {"int": "1", "bool": True}),
    "a key of an int that is none": at("structure/0/keys/0", {"int": "1e3"}),
    "a key of a huge int": at("structure/0/keys/0", {"int": "0x" + "f" * 10**5}),
    "a key of a float beyond": at("structure/0/keys/0", {"float": "0x1.0p+9999"}),
    "a list that claims a terabyte": at("structure/0", {"node": "list", "length": 1 << 40}),
    "a list of a negative length": at("structure/0", {"node": "list", "length": -1}),
    "a list of a float length": at("structure/0", {"node": "list", "length": 8.0}),
    "levels without end": at("structure", [{"node": "list", "length": 1}] * 2000 + [1]),
    # Values.
    "a value too many": at("values", lambda values: [*values, None]),
    "a value too few": at("values", lambda values: values[:-1]),
    "an int that is true": at("values/0", True),
    "an int that is a float": at("values/0", 1.0),
    "an int beyond 2**53 as a number": at("values/0", 2**60),
    "an int in octal": at("values/0", "0o7"),
    "a float that is an int": at("values/1", 2),
    "a float that is text": at("values/1", "2.5"),
    "a nan that is none": at("values/1", "nan:3ff0000000000000"),
    "None that is something": at("values/2", 0),
    "text that is a number": at("values/3", 5),
    "text of bad base64": at("values/3", {"base64": "?"}),
    "text of bad UTF-8": at("values/3", {"base64": "/w=="}),
    "bytes that are not base64": at("values/4", "?"),
    "a bool that is a number": at("values/5", 1),
    "complex of one number": at("values/6", [1.0]),
    "complex of ints": at("values/6", [1, 2]),
    # The rest.
    "an attempt that leads elsewhere": at("attempt", "../../../../etc"),
    "no processes": at("processes", 0),
    "a mesh that is not text": at("meshes", [1]),
    "metadata that is a list": at("metadata", []),
    "metadata of many levels": at("metadata/deep", nested(600)),
    "versions of many levels": at("written/deep", nested(600)),
    "a codec of many levels": at("chunks/codec", nested(600)),
    "a count of a thousand digits": at("structure/1", 10**1000),
    "a length of a thousand digits": at("structure/0", {"node": "list", "length": 10**1000}),
    "a size of a thousand digits": at("files/0/nbytes", 10**1000),
    "a shape of a thousand digits": in_type("a", "shape", [10**1000, 1]),
} | {f"without {name}": without(name) for name in MEMBERS}


def refused(folder: Path) -> TreeringError:
    """What every reader of a folder says; they have to agree."""
    with pytest.raises(TreeringError) as parsing:
        treering.open(folder)
    for read in (treering.load, treering.inspect):
        with pytest.raises(TreeringError) as reading:
            read(folder)
        assert type(reading.value) is type(parsing.value)
    if isinstance(parsing.value, CorruptError):
        found = treering.verify(folder)
        assert not found.ok
        assert found.findings[0].file == "treering.json"
    else:
        with pytest.raises(type(parsing.value)):
            treering.verify(folder)
    return parsing.value


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", CASES)
def test_lies_in_an_index(ckpt: Path, name: str) -> None:
    before = (ckpt / "treering.json").read_bytes()
    rewrite(ckpt, lambda _: None)
    assert json.loads((ckpt / "treering.json").read_bytes()) | {"digest": ""} == json.loads(before) | {"digest": ""}
    assert treering.verify(ckpt)
    rewrite(ckpt, CASES[name])
    error = refused(ckpt)
    assert isinstance(error, CorruptError | FormatError | UnsupportedError)
    assert len(str(error)) < 1500


@pytest.mark.sampled(7)
@pytest.mark.parametrize("value", NOT_WHOLE, ids=repr)
@pytest.mark.parametrize(
    "place",
    [
        "chunks/leaf/0",
        "chunks/file/0",
        "chunks/offset/0",
        "chunks/nbytes/0",
        "chunks/block/0",
        "leaves/type/0",
        "files/0/nbytes",
        "files/0/header",
        "processes",
    ],
)
def test_numbers_that_are_none(ckpt: Path, place: str, value: Any) -> None:
    rewrite(ckpt, at(place, value))
    refused_or_the_same(ckpt, place, value)


def refused_or_the_same(ckpt: Path, place: str, value: Any) -> None:
    """The number of processes may be anything above zero; all other numbers follow from the rest."""
    if place == "processes" and type(value) is int and value > 0:
        treering.load(ckpt)
    else:
        assert isinstance(refused(ckpt), CorruptError)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("value", [None, 1, 1.5, True, "x", [], {}, [[]], [{}], [None], {"a": 1}], ids=repr)
@pytest.mark.parametrize("name", MEMBERS)
def test_members_of_another_type(ckpt: Path, name: str, value: Any) -> None:
    rewrite(ckpt, at(name, value))
    fits = {"processes": int, "metadata": dict, "written": dict, "meshes": list, "replaces": list}
    if type(value) is fits.get(name) and value not in ([[]], [{}], [None]):
        treering.open(ckpt).close()
    else:
        refused(ckpt)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    "body",
    [
        "",
        "}",
        '"a": 1',
        '"a": 1}}',
        '"a": 1}\n{}',
        '"a": NaN}',
        '"a": Infinity}',
        '"a": 1e999}',
        '"a": -1e999}',
        f'"a": {"9" * 5000}}}',
        f'"a": {"[" * 100_000}',
        f'"a": {"[" * 100_000}{"]" * 100_000}}}',
        '"a": 1, "a": 1}',
        '"a": {"b": 1, "b": 1}}',
        '"a": "\x01"}',
        "'a': 1}",
        '"a": 01}',
        '"a": tru}',
        '"treering": 1}',
        '"digest": "x"}',
    ],
    ids=range(20),
)
def test_texts_that_are_no_strict_json(ckpt: Path, body: str) -> None:
    (ckpt / "treering.json").write_bytes(signed_text(body))
    assert isinstance(refused(ckpt), CorruptError)


def test_letters_beyond_ascii_are_no_index(ckpt: Path) -> None:
    document = document_of(ckpt)
    text = signed(document | {"metadata": {"note": "NOTE"}}).decode().replace("NOTE", "é").split("\n", 1)[1]
    (ckpt / "treering.json").write_bytes(signed_text(text))
    assert "ASCII" in str(refused(ckpt))


@pytest.mark.parametrize("version", ["2", "6", "999999999"])
def test_a_newer_version_says_so(ckpt: Path, version: str) -> None:
    (ckpt / "treering.json").write_bytes(signed_text('"quite": "different"}', version))
    error = refused(ckpt)
    assert isinstance(error, FormatError)
    assert "newer treering" in str(error)
    (ckpt / "treering.json").write_bytes(f'{{"treering": {version}, "whatever": 1}}'.encode())
    assert isinstance(refused(ckpt), FormatError)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"\0" * 100, b'{"treering": 1}', b'{"treering": 0, "digest": "x"}', b"\xff"]
)
def test_files_that_are_no_index(ckpt: Path, data: bytes) -> None:
    (ckpt / "treering.json").write_bytes(data)
    assert isinstance(refused(ckpt), CorruptError)


def test_a_version_that_was_hit_is_damage_and_no_newer_version(ckpt: Path) -> None:
    path = ckpt / "treering.json"
    path.write_bytes(path.read_bytes().replace(b'{"treering": 1,', b'{"treering": 3,', 1))
    assert isinstance(refused(ckpt), CorruptError)


# ---------------------------------------------------------------------------------------------------------- file system


def data_file(ckpt: Path) -> Path:
    (found,) = ckpt.glob("data-*")
    return found


def test_a_link_for_an_index(ckpt: Path, tmp_path: Path) -> None:
    (ckpt / "treering.json").rename(tmp_path / "elsewhere.json")
    (ckpt / "treering.json").symlink_to(tmp_path / "elsewhere.json")
    assert not treering.verify(ckpt).ok
    with pytest.raises(FormatError, match="link"):
        treering.load(ckpt)


def test_a_link_for_a_data_file(ckpt: Path, tmp_path: Path) -> None:
    data = data_file(ckpt)
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    found = treering.verify(ckpt)
    assert not found.ok
    assert "link" in str(found)
    with pytest.raises(FormatError, match="link"):
        treering.load(ckpt)


def test_a_pipe_for_a_data_file_does_not_wait(ckpt: Path) -> None:
    data = data_file(ckpt)
    data.unlink()
    os.mkfifo(data)
    assert not treering.verify(ckpt).ok
    with pytest.raises(TreeringError):
        treering.load(ckpt)


def test_a_folder_for_a_data_file(ckpt: Path) -> None:
    data = data_file(ckpt)
    data.unlink()
    data.mkdir()
    assert not treering.verify(ckpt).ok
    with pytest.raises(TreeringError):
        treering.load(ckpt)


def test_a_missing_folder_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        treering.verify(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError):
        treering.verify(tmp_path / "empty")
