"""Any change to an index, signed again: it ends in an error of ours or in a tree, and load and verify agree."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treering
from tests.checkpoint.documents import Document, document_of, sample, signed, signed_text
from tests.properties.strategies import quick
from treering.errors import MismatchError, TreeringError, UnsupportedError


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample(tmp_path_factory.mktemp("mutations") / "ckpt")


@pytest.fixture(scope="module")
def original(ckpt: Path) -> Document:
    return document_of(ckpt)


NUMBERS = st.one_of(
    st.integers(-3, 70),
    st.integers(-(2**70), 2**70),
    st.sampled_from([2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 4096, 65536, 1 << 20]),
)
TEXTS = st.one_of(
    st.text(max_size=4),
    st.sampled_from(
        ["", "a", "0", "..", "/", "~", "float32", "int4", "U8", "dict", "other", "numpy", "jax", "str", "key"]
    ),
    st.sampled_from(["nan", "inf", "0x10", "AAAA", "xxh3-64", "\ud800"]),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.floats(allow_nan=False, allow_infinity=False), TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["node", "keys", "length", "int", "tuple", "base64", "kind", "x"]), inner, max_size=2
        ),
    ),
    max_leaves=4,
)


def places(node: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document."""
    if way:
        yield way
    if isinstance(node, dict):
        for name in node:
            yield from places(node[name], (*way, name))
    elif isinstance(node, list):
        for number in range(len(node)):
            yield from places(node[number], (*way, number))


def held(document: Document, way: tuple[Any, ...]) -> Any:
    for part in way:
        document = document[part]
    return document


@st.composite
def mutated(draw: st.DrawFn, original: Document) -> Document:
    """A document with one to three changes."""
    document = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        way = draw(st.sampled_from(sorted(places(document), key=repr)))
        node, last = held(document, way[:-1]), way[-1]
        what = draw(st.sampled_from(["replace", "remove", "repeat", "swap", "nudge"]))
        if what == "nudge" and type(node[last]) is int:
            node[last] += draw(st.sampled_from([-64, -8, -1, 1, 8, 64, 4096]))
        elif what == "remove":
            del node[last]
        elif what == "repeat" and isinstance(node, list):
            node.insert(last, copy.deepcopy(node[last]))
        elif what == "swap" and isinstance(node, list):
            other = draw(st.integers(0, len(node) - 1))
            node[last], node[other] = node[other], node[last]
        else:
            node[last] = draw(VALUES)
    return document


def outcome(folder: Path) -> tuple[bool, bool | None]:
    """Whether load works, and what verify says; None where it raises."""
    loads, whole = True, None
    try:
        treering.load(folder)
    except (UnsupportedError, MismatchError):
        return True, None  # sound, but nothing that this machine has a form for
    except TreeringError:
        loads = False
    with contextlib.suppress(TreeringError):
        whole = treering.verify(folder).ok
    return loads, whole


def opened(ckpt: Path, index: bytes) -> None:
    """Open the checkpoint with another index, and put the old one back."""
    before = (ckpt / "treering.json").read_bytes()
    (ckpt / "treering.json").write_bytes(index)
    try:
        treering.open(ckpt).close()
    finally:
        (ckpt / "treering.json").write_bytes(before)


@quick(150)
@given(data=st.data())
def test_changed_members(
    ckpt: Path, original: Document, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    document = data.draw(mutated(original))
    folder = tmp_path_factory.mktemp("changed")
    for file in ckpt.iterdir():
        if file.name != "treering.json":
            (folder / file.name).hardlink_to(file)
    (folder / "treering.json").write_bytes(signed(document))
    try:
        loads, whole = outcome(folder)
        assert whole is None or loads == whole
        assert whole is not None or not loads or unsupported(folder)
    finally:
        shutil.rmtree(folder)


def unsupported(folder: Path) -> bool:
    try:
        treering.load(folder)
    except (UnsupportedError, MismatchError):
        return True
    except TreeringError:
        return False
    return False


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("single") / "a.safetensors"
    treering.save(
        path, {"a": np.arange(6), "b": [np.ones(3), None, np.zeros(0)], "c": {"d": np.int8(3)}}, metadata={"m": 1}
    )
    return path.read_bytes()


@quick(200)
@given(data=st.data())
def test_changed_members_of_a_single_file(
    single: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    size = 8 + struct.unpack("<Q", single[:8])[0]
    header = json.loads(single[8:size])
    document = json.loads(header["__metadata__"]["treering.index"])
    del document["treering"], document["digest"]
    changed = data.draw(mutated(document))
    # Written as the writer would, so that only what the change meant is new.
    header["__metadata__"]["treering.index"] = signed(changed).decode()
    if data.draw(st.booleans()):
        header = data.draw(mutated(header))
    text = json.dumps(header, separators=(",", ":")).encode().ljust(size - 8)
    path = tmp_path_factory.mktemp("changed") / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + single[size:])
    loads, whole = outcome(path)
    assert whole is None or loads == whole
    path.unlink()


@quick(200)
@given(data=st.data())
def test_changed_letters(ckpt: Path, original: Document, data: st.DataObject) -> None:
    text = json.dumps(original)[1:]
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        stop = start + data.draw(st.sampled_from([0, 1, 1, 2, 8, 100, 1000]))
        put = data.draw(
            st.sampled_from(
                ["", "0", "9", "-", ".", "e9", "[", "]", "{", "}", '"', ",", ":", "\\", "null", "\x00", "é"]
            )
        )
        text = text[:start] + put + text[stop:]
    with contextlib.suppress(TreeringError):
        opened(ckpt, signed_text(text))


@quick(200)
@given(data=st.data())
def test_changed_bytes_without_a_new_signature(ckpt: Path, data: st.DataObject) -> None:
    good = (ckpt / "treering.json").read_bytes()
    place = data.draw(st.integers(0, len(good) - 1))
    bad = good[:place] + bytes([good[place] ^ data.draw(st.integers(1, 255))]) + good[place + 1 :]
    with pytest.raises(TreeringError):
        opened(ckpt, bad)
