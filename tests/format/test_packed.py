"""Packed columns, the index of many leaves: what is wrong in them is named, and they cost no more than they say."""

from __future__ import annotations

import dataclasses
import json
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treering
from tests.checkpoint.documents import Document, document_of, sample, signed_text
from tests.checkpoint.test_mutations import mutated, outcome
from tests.format.indexes import index_of, indexes
from tests.limits import lower
from tests.properties.strategies import quick
from treering._codec.key_document import attempts_in, fenced
from treering._format.document import encode_index, parse_index, read_summary
from treering._format.index import Container, Index, LeafType, Token
from treering._format.packed import pack, unpack
from treering.errors import CorruptError, FormatError, TreeringError

F32 = LeafType(kind="numpy", dtype="float32", shape=(2,))
PAIR = ((0, 1),), ((1, 2),)


@pytest.fixture(scope="module", autouse=True)
def every_index_is_packed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        lower(patch, packed_index_from=0)
        yield


def small() -> Index:
    """Leaves a and b in parts, c in one, d a Python value."""
    rows = [(0, PAIR[0]), (0, PAIR[1]), (1, PAIR[0]), (1, PAIR[1]), (2, None)]
    types = [F32, LeafType(kind="int")]
    return index_of(["a", "b", "c", "d"], types, [0, 0, 0, 1], [rows], values={3: 7})


def signed(document: Document) -> bytes:
    return signed_text(json.dumps(document)[1:], "4")


def document() -> Document:
    found: Document = json.loads(encode_index(small()))
    assert found.pop("treering") == 4
    del found["digest"]
    return found


# ------------------------------------------------------------------------------------------------------- there and back


@quick(150)
@given(indexes())
def test_an_index_comes_back(index: Index) -> None:
    data = encode_index(index)
    assert data.startswith(b'{"treering": 4, "digest": "xxh3-128:')
    back = parse_index(data)
    assert back == index
    assert encode_index(back) == data
    assert data.isascii()


@quick(100)
@given(indexes(), st.data())
def test_every_byte_is_under_the_digest(index: Index, data: st.DataObject) -> None:
    good = encode_index(index)
    place = data.draw(st.integers(0, len(good) - 1))
    bad = good[:place] + bytes([good[place] ^ data.draw(st.integers(1, 255))]) + good[place + 1 :]
    for wrong in (bad, good[:place], good + b"\n"):
        with pytest.raises(CorruptError):
            parse_index(wrong)


@pytest.mark.parametrize(
    ("column", "text"),
    [([], "u1:"), ([255], "u1:/w=="), ([256], "u2:AAE="), ([1 << 16], "u4:AAABAA=="), ([1 << 32], "u8:AAAAAAEAAAA=")],
)
def test_a_column_has_the_smallest_items_that_hold_it(column: list[int], text: str) -> None:
    assert pack(column) == text
    assert unpack(text, 1 << 63, "it") == column
    with pytest.raises(CorruptError, match="not from 0"):
        unpack(pack([*column, 7]), 7, "it")


def test_smaller_indexes_and_single_files_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    lower(monkeypatch, packed_index_from=5)
    assert encode_index(small()).startswith(b'{"treering": 1, ')
    lower(monkeypatch, packed_index_from=4)
    assert encode_index(small()).startswith(b'{"treering": 4, ')
    single = index_of(["a"], [F32], [0], [[(0, None)]], single=True)
    lower(monkeypatch, packed_index_from=0)
    assert encode_index(single, embedded=True).startswith(b'{"treering": 2, ')


def test_long_key_texts_are_kept_in_lists() -> None:
    for length, version in ((256, 4), (257, 1)):
        index = index_of(["k" * length], [F32], [0], [[(0, None)]])
        data = encode_index(index)
        assert data.startswith(b'{"treering": %d, ' % version)
        assert parse_index(data) == index


def test_what_is_alike_lies_there_once() -> None:
    index = small()
    layer = Container(node="dict", keys=("w",))
    root = Container(node="dict", keys=("a", "b", "c", "d"))
    structure = [root, layer, 1, Container(node="dict", keys=("w",)), 1, layer, 1, layer, 1]
    keys = ["a/w", "b/w", "c/w", "d/w"]
    found = json.loads(encode_index(Index(**index.columns() | vars_of(index) | {"structure": structure, "keys": keys})))
    assert [node["keys"] for node in found["structure"]["containers"]] == [["a", "b", "c", "d"], ["w"]]
    assert unpack(found["structure"]["tokens"], 9, "it") == [0, 1, 2, 1, 2, 1, 2, 1, 2]
    assert found["chunks"]["boxes"] == [[[0, 1]], [[1, 2]], None]
    assert found["chunks"]["file"] == 0


def vars_of(index: Index) -> dict[str, Any]:
    names = ("attempt", "written", "processes", "meshes", "chunks", "checksums", "files", "replaces", "metadata")
    return {name: getattr(index, name) for name in names}


def test_runs_and_buckets_read_its_lines_and_a_fence_keeps_its_version() -> None:
    data = encode_index(small())
    assert read_summary(data).attempt == attempts_in(data)[0] == small().attempt
    again = fenced(fenced(data))
    assert again.startswith(b'{"treering": 4, ')
    assert again != data
    assert parse_index(again) == parse_index(data)


# ------------------------------------------------------------------------------------------------------- what is wrong


def column(name: str, value: Any) -> Callable[[Document], None]:
    return lambda found: found["chunks"].__setitem__(name, value)


def tokens(*numbers: int) -> Callable[[Document], None]:
    return lambda found: found["structure"].__setitem__("tokens", pack(numbers))


def types(value: Any) -> Callable[[Document], None]:
    return lambda found: found["leaves"].__setitem__("type", value)


def drop(name: str) -> Callable[[Document], None]:
    return lambda found: found["chunks"].pop(name)


def contain(*nodes: Any) -> Callable[[Document], None]:
    return lambda found: found["structure"].__setitem__("containers", list(nodes))


DEEP = {"node": "list", "length": 1}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (column("offset", "u4:AAE="), "'offset' of the chunks has 2 bytes, not 4 for each number"),
        (column("offset", "u4:A*E="), "'offset' of the chunks is not base64"),
        (column("offset", "u4:AAEC"[:-1]), "'offset' of the chunks is not base64"),
        (column("offset", "u3:AAEC"), "'offset' of the chunks is 'u3:AAEC', not a packed column"),
        (column("offset", "AAEC"), "not a packed column"),
        (column("offset", [4096]), "'offset' is a list"),
        (column("offset", 4096), "'offset' is 4096"),
        (column("offset", pack([1 << 63] * 5)), "'offset' of the chunks holds a number that is not from 0"),
        (column("offset", pack([4096, 4100, 4104, 4108, 4111])), "bytes 4111 to 4112.*cannot belong to 'b', 'c'"),
        (column("offset", pack([4096, 4100, 4104, 4108])), "of unequal length"),
        (column("nbytes", pack([4, 4, 4, 4])), "of unequal length"),
        (column("nbytes", -4), "'nbytes' of the chunks holds a number"),
        (column("nbytes", 1 << 64), "'nbytes' of the chunks holds a number"),
        (column("nbytes", 4), "takes 8 bytes, its chunk in file 0 has 4"),
        (column("nbytes", True), "'nbytes' of the chunks is True, not a packed column"),
        (column("nbytes", 4.0), "'nbytes' of the chunks is 4.0, not a packed column"),
        (column("nbytes", None), "'nbytes' of the chunks is None, not a packed column"),
        (drop("nbytes"), "'nbytes' of the chunks is '', not a packed column"),
        (drop("leaf"), "'leaf' of the chunks is '', not a packed column"),
        (drop("offset"), "no member 'offset'"),
        (drop("boxes"), "no member 'boxes'"),
        (column("leaf", None), "of unequal length"),
        (column("leaf", pack([0, 0, 1, 1, 4])), "'leaf' of the chunks holds a number that is not from 0 to 3"),
        (column("leaf", pack([0, 0, 1, 1, 3])), "leaf 'c' lies in no file"),
        (column("leaf", pack([0, 0, 2, 2, 1])), "in the place of those of another leaf"),
        (column("leaf", 0), "leaf 'b' lies in no file"),
        (column("file", 1), "'file' of the chunks holds a number that is not from 0 to 0"),
        (column("block", 3), "not a power of two"),
        (column("box", 0), "do not cover it|takes"),
        (column("box", 3), "'box' of the chunks holds a number that is not from 0 to 2"),
        (column("boxes", []), "'box' of the chunks holds a number that is not from 0 to -1"),
        (column("boxes", [[[0, 1]], [[1, -2]], None]), "the column 'box' of the chunks holds a number"),
        (column("boxes", [[[0, 1]], [[1, 1.5]], None]), "something other than whole numbers"),
        (column("boxes", [[[0, 1]], 7, None]), "the box of chunk 1 is not a list of pairs"),
        (types("u1:AAAA"), "the structure has 4 leaves, there are 3 keys|'tokens'|tokens"),
        (types(pack([0, 0, 0, 2])), "the column of leaf types holds a number that is not from 0 to 1"),
        (types([0, 0, 0, 1]), "'type' is a list"),
        (types(0), "'type' is 0"),
        (types(pack([0, 0, 0, 0])), "0 leaves lie in no file"),
        (tokens(0), "the structure has 0 leaves, there are 4"),
        (tokens(0, 4, 1), "the structure has 5 leaves|not from 0"),
        (tokens(4, 0), "continues after its end"),
        (tokens(0, 0, 4), "the containers have 8 children, there are 5"),
        (tokens(0, 9), "the column of tokens holds a number that is not from 0 to 4"),
        (lambda found: found.__setitem__("structure", []), "'structure' is a list"),
        (lambda found: found["structure"].pop("tokens"), "the column of tokens is None, not a packed column"),
        (contain({"node": "dict", "keys": ["a", "a", "b", "c"]}), "container 0 of the structure has two children"),
        (contain({"node": "list", "length": 1 << 40}), "container 0 of the structure is a list of"),
        (contain({"node": "dict", "keys": ["a" * 300, "b" * 300, "c" * 300, "d" * 300]}), "more than 256 characters"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(change: Callable[[Document], object], message: str) -> None:
    found = document()
    assert parse_index(signed(found)) == small()
    change(found)
    with pytest.raises(CorruptError, match=message) as caught:
        parse_index(signed(found))
    assert str(caught.value).startswith("treering.json")


@pytest.mark.parametrize("levels", [1024, 1025])
def test_it_has_as_many_levels_as_any_tree(levels: int) -> None:
    found = document()
    found["structure"] = {"containers": [DEEP, *found["structure"]["containers"]], "tokens": ""}
    found["structure"]["tokens"] = pack([*[0] * (levels - 1), 1, 5])
    with pytest.raises(CorruptError, match="characters" if levels == 1024 else "characters|levels|deep"):
        parse_index(signed(found))


@pytest.mark.parametrize("change", [column("codec", "zstd"), contain({"node": "set"})])
def test_what_is_newer_is_no_damage(change: Callable[[Document], object]) -> None:
    found = document()
    change(found)
    with pytest.raises(FormatError, match="newer treering") as caught:
        parse_index(signed(found))
    assert not isinstance(caught.value, CorruptError)


def test_lists_and_packed_columns_do_not_pass_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = document()
    lower(monkeypatch, packed_index_from=5)
    lists = json.loads(encode_index(small()))
    del lists["treering"], lists["digest"]
    for wrong in (signed_text(json.dumps(packed)[1:], "1"), signed(lists)):
        with pytest.raises(CorruptError):
            parse_index(wrong)


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory, every_index_is_packed: None) -> Path:
    return sample(tmp_path_factory.mktemp("packed") / "ckpt")


@quick(150)
@given(data=st.data())
def test_changed_members(ckpt: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    changed = data.draw(mutated(document_of(ckpt)))
    folder = tmp_path_factory.mktemp("changed")
    for file in ckpt.iterdir():
        if file.name != "treering.json":
            (folder / file.name).hardlink_to(file)
    (folder / "treering.json").write_bytes(signed(changed))
    loads, whole = outcome(folder)
    assert whole is None or loads == whole
    try:
        index = parse_index(signed(changed))
    except TreeringError:
        return
    assert parse_index(encode_index(index)) == index


# ------------------------------------------------------------------------------------------------------- what it costs


def hostile(containers: list[Any], numbers: list[int], leaves: int) -> bytes:
    """An index of leaves that are None."""
    found = document()
    none = {"types": [{"kind": "none"}], "leaves": {"type": pack([0] * leaves)}, "values": [None] * leaves}
    chunks: Document = {
        "leaf": None,
        "file": "u1:",
        "offset": "u1:",
        "nbytes": 0,
        "block": 65536,
        "boxes": [],
        "box": "u1:",
    }
    more = {"chunks": chunks | {"codec": None}, "checksums": found["checksums"] | {"table": ""}, "files": []}
    return signed(found | none | more | {"structure": {"containers": containers, "tokens": pack(numbers)}})


@pytest.mark.parametrize("leaves", [0, 1])
def test_long_names_above_many_containers_are_not_put_together(leaves: int) -> None:
    """A name of a MiB with ten thousand containers below it, in each of which is a leaf or none."""
    count = 10_000
    root, inner = {"node": "dict", "keys": ["n" * (1 << 20)]}, {"node": "list", "length": count}
    below = {"node": "list", "length": leaves}
    data = hostile([root, inner, below], [0, 1, *([2, 3] if leaves else [2]) * count], leaves * count)
    tracemalloc.start()
    try:
        if leaves:
            with pytest.raises(CorruptError, match="more than 256 characters for each leaf"):
                parse_index(data)
        else:
            assert parse_index(data).keys == []
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_static_fields_are_not_repeated_without_end() -> None:
    """One container of hundreds of fields, which stands for a thousand objects that would have all of them."""
    other = {"node": "other", "class": "a.B", "fields": [], "static": {f"s{n}": "x" for n in range(300)}}
    data = hostile([{"node": "list", "length": 1001}, other], [0, *[1] * 1000, 2], 1)
    with pytest.raises(CorruptError, match="the static fields have more than 256 characters for each leaf"):
        parse_index(data)


@pytest.mark.parametrize(("characters", "version"), [(248, 4), (249, 1)])
def test_a_tree_of_longer_static_fields_is_written_as_lists(characters: int, version: int) -> None:
    node = Container(node="other", keys=("w",), class_name="a.B", static=(("s", "x" * characters),))
    tree: list[Token] = [Container(node="list", keys=(0, 1)), node, 1, node, 1]
    index = index_of(["0/w", "1/w"], [LeafType(kind="none")], [0, 0], [], values={0: None, 1: None})
    index = dataclasses.replace(index, structure=tree)
    data = encode_index(index)
    assert json.loads(data)["treering"] == version
    assert parse_index(data) == index


def test_a_long_name_below_itself_is_not_put_together() -> None:
    """A name of 64 KiB, a thousand times on the way to one leaf."""
    data = hostile([{"node": "dict", "keys": ["n" * (1 << 16)]}], [*[0] * 1000, 1], 1)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError, match="more than 256 characters"):
            parse_index(data)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_opening_costs_no_call_for_each_leaf(tmp_path: Path) -> None:
    """Twice the leaves, and as many calls of functions."""

    def counted(leaves: int) -> int:
        tree = {f"group {group}": {f"leaf {n}": np.zeros(3) for n in range(leaves // 4)} for group in range(4)}
        treering.save(tmp_path / str(leaves), tree)
        calls = 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1

        def read() -> None:
            with treering.open(tmp_path / str(leaves)) as opened:
                assert opened["group 2/leaf 5"][1] == 0

        read()
        sys.setprofile(count)
        try:
            read()
        finally:
            sys.setprofile(None)
        return calls

    few, many = counted(1000), counted(2000)
    assert many - few < 20
