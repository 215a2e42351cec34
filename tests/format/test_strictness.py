"""What is certainly wrong for every reader is refused with the index; what a newer writer made is called so."""

from __future__ import annotations

import codecs
import contextlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treering
from tests.checkpoint.documents import Document, document_of, rewrite, sample, signed
from tests.checkpoint.test_mutations import mutated
from tests.format.indexes import index_of
from tests.properties.strategies import quick
from treering._format.document import encode_index, parse_index
from treering._format.index import LeafType
from treering._format.leaf_values import decode_type
from treering._format.safetensors import header_bytes, parse_safetensors, single_file
from treering._values.checksums import block_checksums, digest
from treering.errors import CorruptError, FormatError, TreeringError, UnsupportedError


@pytest.mark.parametrize(
    ("impl", "dtype", "shape", "good"),
    [
        ("threefry2x32", "uint32", [2], True),
        ("threefry2x32", "uint32", [5, 2], True),
        ("rbg", "uint32", [4], True),
        ("unsafe_rbg", "uint32", [0, 4], True),
        ("somebody's", "uint64", [], True),
        ("threefry2x32", "uint32", [4], False),
        ("threefry2x32", "uint32", [], False),
        ("threefry2x32", "uint64", [2], False),
        ("rbg", "uint32", [2], False),
        ("unsafe_rbg", "uint32", [4, 1], False),
        ("somebody's", "int32", [2], False),
        ("somebody's", "float32", [2], False),
        ("somebody's", "uint4", [2], False),
    ],
)
def test_the_data_of_keys(impl: str, dtype: str, shape: list[int], good: bool) -> None:
    node = {"kind": "key", "dtype": dtype, "shape": shape, "impl": impl}
    if good:
        assert decode_type(node, 0).impl == impl
    else:
        with pytest.raises(CorruptError, match="keys of"):
            decode_type(node, 0)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_of_jax_are_as_the_table_says(tmp_path: Path, impl: str) -> None:
    keys = jax.random.split(jax.random.key(3, impl=impl), 3)
    treering.save(tmp_path / "ckpt", keys)
    assert treering.verify(tmp_path / "ckpt")
    assert (treering.load(tmp_path / "ckpt") == keys).all()


def test_a_numpy_scalar_has_no_axes() -> None:
    assert decode_type({"kind": "numpy scalar", "dtype": "int8", "shape": []}, 0).shape == ()
    with pytest.raises(CorruptError, match="numpy scalar"):
        decode_type({"kind": "numpy scalar", "dtype": "int8", "shape": [1]}, 0)


# -------------------------------------------------------------------------------------------------------- newer writers


def document() -> Document:
    index = index_of(["a"], [LeafType(kind="numpy", dtype="float32", shape=(2,))], [0], [[(0, None)]])
    found: Document = json.loads(encode_index(index))
    del found["treering"], found["digest"]
    return found


def set_node(found: Document) -> None:
    found["structure"][0]["node"] = "set"


def set_key(found: Document) -> None:
    found["structure"][0]["keys"] = [{"decimal": "1.5"}]


def set_kind(found: Document) -> None:
    found["types"][0]["kind"] = "sparse"


def set_codec(found: Document) -> None:
    found["chunks"]["codec"] = "zstd"


def set_algorithm(found: Document) -> None:
    found["checksums"]["algorithm"] = "blake3"


def set_dtype(found: Document) -> None:
    found["types"][0]["dtype"] = "float5"


@pytest.mark.parametrize("change", [set_node, set_key, set_kind, set_codec, set_algorithm, set_dtype])
def test_what_is_newer_is_no_damage(change: Callable[[Document], None]) -> None:
    found = document()
    change(found)
    with pytest.raises(UnsupportedError if change is set_dtype else FormatError) as caught:
        parse_index(signed(found))
    assert not isinstance(caught.value, CorruptError)
    assert str(caught.value).startswith("treering.json: ")
    assert str(caught.value).endswith("; use a newer treering")


@pytest.mark.parametrize(
    "keys",
    [
        [{"int": "1"}, "1"],
        [{"int": "1"}, {"float": "0x1.0000000000000p+0"}],
        [{"int": "1"}, {"bool": True}],
        [{"float": "nan"}, {"float": "nan:7ff8000000000001"}],
        [{"tuple": [{"text": "x", "class": "m.C"}]}, "b"],
        [{"tuple": [{"tuple": [{"text": "x", "class": "m.C"}]}]}, "b"],
    ],
    ids=json.dumps,
)
def test_keys_of_one_container(keys: list[Any]) -> None:
    found = document()
    empty = {"node": "dict", "keys": []}
    found["structure"] = [{"node": "dict", "keys": ["a", "more"]}, 1, {"node": "dict", "keys": keys}, empty, empty]
    with pytest.raises(CorruptError, match=r"same name|holds the text"):
        parse_index(signed(found))
    found["structure"][2]["keys"] = ["x", {"tuple": [{"int": "1"}]}]
    assert len(parse_index(signed(found)).structure) == 5


# --------------------------------------------------------------------------------------------------------- single files


@pytest.mark.parametrize(
    "kind",
    [
        LeafType(kind="int"),
        LeafType(kind="key", dtype="uint32", shape=(2,), impl="rbg2"),
        LeafType(kind="bytes", dtype="uint8", shape=(9,)),
        LeafType(kind="numpy", dtype="int4", shape=(2,)),
    ],
    ids=str,
)
def test_a_single_file_holds_arrays_and_none_only(kind: LeafType) -> None:
    rows = [(0, None)] if kind.stored else []
    index = index_of(["a"], [kind], [0], [rows], values={} if kind.stored else {0: 7}, single=True)
    moved, header, _ = single_file(index, header_bytes(index, 0))
    content = header + bytes(moved.files[0].nbytes - len(header))
    with pytest.raises(CorruptError, match="which no safetensors file holds"):
        parse_safetensors(len(content), lambda offset, n: content[offset : offset + n])


def test_a_single_file_holds_no_parts() -> None:
    kind = LeafType(kind="numpy", dtype="int8", shape=(2,))
    index = index_of(["a"], [kind], [0], [[(0, ((0, 1),)), (0, ((1, 2),))]], single=True)
    moved, header, _ = single_file(index, header_bytes(index, 0))
    content = header + bytes(moved.files[0].nbytes - len(header))
    with pytest.raises(CorruptError, match="in parts"):
        parse_safetensors(len(content), lambda offset, n: content[offset : offset + n])


# ----------------------------------------------------------------------------------------------------------------- text


def replaced_text(folder: Path, content: bytes) -> None:
    """Put other bytes of equal length into the only leaf, with checksums and digests that fit them."""
    (data,) = folder.glob("data-*")
    raw = data.read_bytes()
    header = raw[: 8 + struct.unpack("<Q", raw[:8])[0]]
    assert len(raw) == len(header) + len(content)
    data.write_bytes(header + content)

    def change(found: Document) -> None:
        sums = np.array(block_checksums(memoryview(content), found["chunks"]["block"][0]), "<u8").tobytes()
        found["checksums"]["table"] = codecs.encode(sums, "base64").decode().replace("\n", "")
        found["files"][0]["digest"] = digest((header, sums))

    rewrite(folder, change)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("content", "where"),
    [
        (b"\xff" + b"x" * 4999, 0),
        (b"x" * 4999 + b"\xc3", 0),
        (b"x" * 4998 + b"\xc3(", 0),
        (b"x" * (2 * MIB + 5) + b"\xfe", 2 * MIB),
        (b"x" * (MIB - 1) + b"\xe2\x28" + b"x" * 9, MIB),
    ],
    ids=["first", "cut short", "last", "third piece", "over a seam"],
)
def test_text_that_is_no_utf_8_is_named(tmp_path: Path, content: bytes, where: int) -> None:
    treering.save(tmp_path / "ckpt", {"note/s": "x" * len(content)})
    replaced_text(tmp_path / "ckpt", content)
    found = treering.verify(tmp_path / "ckpt")
    (finding,) = found.findings
    (data,) = (tmp_path / "ckpt").glob("data-*")
    header = data.stat().st_size - len(content)
    assert (finding.key, finding.file, finding.start) == ("note~1s", data.name, header + where)
    assert "UTF-8" in str(finding)
    with pytest.raises(TreeringError):
        treering.load(tmp_path / "ckpt")


@pytest.mark.parametrize("around", range(6))
def test_characters_on_a_seam_are_text(tmp_path: Path, around: int) -> None:
    text = "x" * (MIB - around) + "\U0001f332\ud800é" + "x" * 9
    treering.save(tmp_path / "ckpt", {"a": text})
    assert treering.verify(tmp_path / "ckpt")
    assert treering.load(tmp_path / "ckpt")["a"] == text


def test_damaged_text_is_one_finding(tmp_path: Path) -> None:
    treering.save(tmp_path / "ckpt", {"a": "x" * 5000})
    (data,) = (tmp_path / "ckpt").glob("data-*")
    raw = bytearray(data.read_bytes())
    raw[-1] = 0xFF
    data.write_bytes(raw)
    (finding,) = treering.verify(tmp_path / "ckpt").findings
    assert finding.problem == "is damaged"


@quick(150)
@given(data=st.data())
def test_what_is_taken_is_written_again_alike(sampled: Document, data: st.DataObject) -> None:
    changed = data.draw(mutated(sampled))
    with contextlib.suppress(TreeringError):
        index = parse_index(signed(changed))
        assert parse_index(encode_index(index)) == index


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Document:
    return document_of(sample(tmp_path_factory.mktemp("again") / "ckpt"))
