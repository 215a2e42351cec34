"""What stands at the key ``treering.json`` of a bucket: tombstones, what waits, and fences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from tests.format.indexes import ATTEMPT, index_of
from treering._codec.documents import SignedForm, json_text
from treering._codec.key_document import (
    INDEX_FORM,
    MOST_SUPERSEDED,
    TOMBSTONE_FORM,
    Superseded,
    attempts_in,
    encode_tombstone,
    fenced,
    index_members,
    is_tombstone,
    is_tombstone_size,
    placeholder,
    superseded_by,
    superseded_in,
    tombstone_of,
)
from treering._format.document import data_name, encode_index, parse_index, read_names
from treering._format.index import LeafType
from treering.errors import CorruptError, FormatError, UnsupportedError

F32 = LeafType(kind="numpy", dtype="float32", shape=(4,))
OLD, OLDER = "a" * 16, "b" * 16
PLAIN = index_of(["a"], [F32], [0], [[(0, None)]])
"""Of attempt ``ATTEMPT``; it replaces a file of attempt ffffffffffffffff, which it lists no more."""
WAITING = dataclasses.replace(
    PLAIN,
    replaces=[data_name(OLD, 0, 1), data_name(OLDER, 0, 1)],
    superseded=(Superseded(OLD, None, [data_name(OLD, 0, 1)]), Superseded(OLDER, 17.25, [data_name(OLDER, 0, 1)])),
)
GAPPED = dataclasses.replace(PLAIN, gapped=True, files=[dataclasses.replace(PLAIN.files[0], nbytes=1 << 20)])
"""Its data file holds bytes of no leaf."""


def tombstone_with(superseded: Any, **more: Any) -> bytes:
    """A tombstone of any list, padded as specified; its digest is right."""
    members = {"nonce": "0" * 32, "superseded": superseded} | more
    lines = ",\n".join(f'"{name}": {json_text(value)}' for name, value in members.items()).encode() + b"}"
    size = len(TOMBSTONE_FORM.sign(lines + b"\n"))
    return TOMBSTONE_FORM.sign(lines + b" " * (-size % 1024) + b"\n")


def test_a_placeholder_is_192_bytes_that_say_nothing_is_there() -> None:
    data = placeholder()
    assert len(data) == 192
    assert data.startswith(b'{"treering": 3, "digest": "xxh3-128:')
    assert data.endswith(b" \n")
    assert is_tombstone(data[:72])
    assert data != placeholder()
    assert attempts_in(data) == ("",)
    assert superseded_in(data) == []
    with pytest.raises(FormatError, match=r"version 3.*newer treering"):
        parse_index(data)


@pytest.mark.parametrize("count", [1, 2, 40])
def test_a_tombstone_with_data_has_a_multiple_of_1024_bytes(count: int) -> None:
    waiting = [Superseded(f"{number:016x}", 0.5, [data_name(f"{number:016x}", 0, 1)]) for number in range(count)]
    data = encode_tombstone(waiting)
    assert not len(data) % 1024
    assert is_tombstone_size(len(data))
    assert superseded_in(data) == waiting
    assert attempts_in(data) == ("", *(one.attempt for one in waiting))


def test_a_tombstone_that_remembers_one_attempt_is_small() -> None:
    remembered = Superseded(ATTEMPT, None, [])
    data = encode_tombstone([remembered])
    assert len(data) == 192
    assert superseded_in(data) == [remembered]
    assert len(encode_tombstone([remembered, Superseded(OLD, 3.0, [])])) == 1024


def test_the_shortest_index_is_longer_than_a_small_tombstone() -> None:
    shortest = index_of([], [], [], [])
    data = encode_index(dataclasses.replace(shortest, written={}, meshes=[], replaces=[], metadata={}))
    assert len(data) > 192


def test_an_index_where_nothing_waits_has_no_such_member() -> None:
    assert b"superseded" not in encode_index(PLAIN)
    assert superseded_in(encode_index(PLAIN)) == []


def test_an_index_says_what_waits() -> None:
    data = encode_index(WAITING)
    assert parse_index(data) == WAITING
    assert superseded_in(data) == list(WAITING.superseded)
    assert attempts_in(data) == (ATTEMPT, OLD, OLDER)
    assert read_names(data) == (data_name(ATTEMPT, 0, 1), *WAITING.replaces)
    assert '"superseded": [{"attempt":"aaaaaaaaaaaaaaaa","since":null,"files":[' in data.decode()


def test_a_tombstone_takes_over_what_an_index_lists() -> None:
    found = superseded_in(tombstone_of(encode_index(WAITING), 99.0))
    assert found == [
        Superseded(ATTEMPT, None, [data_name(ATTEMPT, 0, 1)]),
        Superseded(OLD, 99.0, [data_name(OLD, 0, 1)]),
        Superseded(OLDER, 17.25, [data_name(OLDER, 0, 1)]),
    ]


def test_what_an_index_replaced_without_a_list_is_taken_over_too() -> None:
    own, other = superseded_by(encode_index(PLAIN), 99.0)
    assert own == Superseded(ATTEMPT, None, [data_name(ATTEMPT, 0, 1)])
    assert other == Superseded("f" * 16, 99.0, [data_name("f" * 16, 0, 1)])
    # The same attempt, of which one file is listed and another is not.
    names = [data_name(OLD, number, 2) for number in range(2)]
    index = dataclasses.replace(PLAIN, replaces=names, superseded=(Superseded(OLD, 5.0, names[:1]),))
    assert superseded_by(encode_index(index), 99.0)[1:] == [Superseded(OLD, 5.0, names)]


def test_a_document_of_another_layout_is_read_all_the_same() -> None:
    document = {
        "attempt": ATTEMPT,
        "files": [{"name": data_name(ATTEMPT, 0, 1)}],
        "replaces": [],
        "metadata": {},
        "superseded": [{"attempt": OLD, "since": 1, "files": []}],
    }
    one_line = json_text(document).removeprefix("{").encode() + b"\n"
    data = INDEX_FORM.sign(one_line)
    assert index_members(data).items() >= document.items()
    assert attempts_in(data) == (ATTEMPT, OLD)
    assert superseded_by(data, 2.0) == [Superseded(ATTEMPT, None, [data_name(ATTEMPT, 0, 1)]), Superseded(OLD, 1.0, [])]


@pytest.mark.parametrize(
    "make",
    [placeholder, lambda: encode_index(PLAIN), lambda: encode_index(WAITING), lambda: encode_index(GAPPED)],
    ids=["tombstone", "index", "with a list", "with gaps"],
)
def test_a_fenced_document_says_the_same_and_is_another(make: Callable[[], bytes]) -> None:
    data = make()
    first, second = fenced(data), fenced(fenced(data))
    assert len({data, first, second}) == 3
    for changed in (first, second):
        assert attempts_in(changed) == attempts_in(data)
        assert superseded_in(changed) == superseded_in(data)
    assert len(first) == len(second)
    if not is_tombstone(data):
        assert parse_index(second) == parse_index(data)
        assert first.splitlines()[1].startswith(b'"fence": "')
        same = index_members(data).keys() - {"digest"}
        assert all(index_members(second)[name] == index_members(data)[name] for name in same)


def test_a_fence_that_stands_elsewhere_is_left_alone() -> None:
    lines = encode_index(PLAIN).partition(b"\n")[2].removesuffix(b"}\n")
    with pytest.raises(UnsupportedError, match="'fence'"):
        fenced(INDEX_FORM.sign(lines + b',\n"fence": "' + b"0" * 32 + b'"}\n'))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (encode_index(PLAIN)[:-3], CorruptError),
        (encode_index(PLAIN).replace(b"float32", b"float64"), CorruptError),
        (b"", CorruptError),
        (placeholder().replace(b'"nonce": "', b'"nonce": "g'), CorruptError),
        (placeholder()[:-1], CorruptError),
        (SignedForm("treering", 6, "treering.json", hint="").encode([("a", 1)]), FormatError),
        (SignedForm("treering", 2, "treering.json", hint="").encode([("a", 1)]), FormatError),
    ],
)
def test_what_is_damaged_or_newer_is_neither_read_nor_fenced(data: bytes, error: type[Exception]) -> None:
    for read in (attempts_in, superseded_in, fenced):
        with pytest.raises(error):
            read(data)
    # It can be removed; the data that it may have listed stay.
    assert superseded_in(tombstone_of(data, 7.0)) == []


NAME = data_name(OLD, 0, 1)


@pytest.mark.parametrize(
    ("node", "problem"),
    [
        ({"attempt": OLD, "since": 1.0, "files": [data_name(OLDER, 0, 1)]}, "none of attempt"),
        ({"attempt": OLD, "since": 1.0, "files": ["model.safetensors"]}, "none of attempt"),
        ({"attempt": OLD, "since": 1.0, "files": [NAME, NAME]}, "none of attempt"),
        ({"attempt": OLD, "since": 1.0, "files": ["../" + NAME]}, "none of attempt"),
        ({"attempt": OLD, "since": 1.0, "files": [7]}, "other than text"),
        ({"attempt": OLD, "since": 1.0, "files": NAME}, "of type list"),
        ({"attempt": "x", "since": 1.0, "files": []}, "not a valid name"),
        ({"attempt": 7, "since": 1.0, "files": []}, "of type str"),
        ({"attempt": OLD, "since": True, "files": []}, "the time True"),
        ({"attempt": OLD, "since": "1", "files": []}, "the time '1'"),
        ({"attempt": OLD, "since": -1, "files": []}, "the time -1"),
        ({"attempt": OLD, "since": 10**400, "files": []}, "the time 1000"),
        ({"attempt": OLD, "files": []}, "the time ''"),
        ([], "not a JSON object"),
    ],
)
def test_a_list_that_contradicts_itself_is_damage(node: Any, problem: str) -> None:
    with pytest.raises(CorruptError, match=problem):
        superseded_in(tombstone_with([node]))


def test_a_list_has_each_attempt_once_and_a_bound() -> None:
    node: dict[str, Any] = {"attempt": OLD, "since": None, "files": []}
    with pytest.raises(CorruptError, match="an attempt twice"):
        superseded_in(tombstone_with([node, node]))
    with pytest.raises(CorruptError, match=r"65,?537 attempts"):
        superseded_in(tombstone_with([None] * (MOST_SUPERSEDED + 1)))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (tombstone_with([], nonce="x" * 32), "the nonce"),
        (tombstone_with([], files=[]), "of its own"),
        (tombstone_with({}), "of type list"),
        (TOMBSTONE_FORM.encode([("nonce", "0" * 32), ("superseded", [])]), "no tombstone has 134 bytes"),
    ],
)
def test_a_tombstone_of_another_form_is_damage(data: bytes, problem: str) -> None:
    with pytest.raises(CorruptError, match=problem):
        attempts_in(data)


def test_live_data_are_never_among_what_waits() -> None:
    index = dataclasses.replace(WAITING, superseded=(Superseded(ATTEMPT, None, [data_name(ATTEMPT, 0, 1)]),))
    with pytest.raises(CorruptError, match="in the list of superseded data"):
        parse_index(encode_index(index))


def test_an_index_knows_the_attempts_that_it_replaced_also_where_nothing_waits() -> None:
    files = [{"name": f"data-{ATTEMPT}-00000-of-00001.safetensors"}]
    replaces = [f"data-{OLD}-00000-of-00001.safetensors", f"data-{OLDER}-00000-of-00001.safetensors"]
    members = [("attempt", ATTEMPT), ("files", files), ("replaces", replaces), ("metadata", {})]
    assert attempts_in(INDEX_FORM.encode(members)) == (ATTEMPT, OLD, OLDER)
