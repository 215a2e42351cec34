"""Documents with a digest in their first line: whole or refused, and a newer one is called so."""

from __future__ import annotations

import json
import re
from array import array
from typing import Any

import pytest

from treering._format.columns import check_name, check_texts, decode_checksums, encode_checksums, read_free_json
from treering._format.signed import SignedForm
from treering.errors import Corrupt, Format, TreeringError, Unsupported

FORM = SignedForm(member="note", version=2, name="the note", hint="write it again")
DATA = FORM.encode([("a", [1, 2]), ("b", {"c": "é"})])


def test_a_member_a_line() -> None:
    assert DATA.decode().splitlines()[1:] == ['"a": [1,2],', '"b": {"c":"\\u00e9"}}']
    assert json.loads(DATA)["note"] == 2
    assert FORM.read(DATA, lambda document: document["b"]) == {"c": "é"}


@pytest.mark.parametrize("place", range(len(DATA)))
def test_every_byte_counts(place: int) -> None:
    bad = DATA[:place] + bytes([DATA[place] ^ 1]) + DATA[place + 1 :]
    assert not FORM.is_whole(bad)
    with pytest.raises(TreeringError):
        FORM.read(bad, lambda document: document)


def test_another_version_is_whole_but_not_read() -> None:
    newer = SignedForm(member="note", version=3, name="the note", hint="").encode([("a", 1)])
    assert FORM.is_whole(newer)
    with pytest.raises(Format, match="the note is of version 3; this treering reads version 2"):
        FORM.read(newer, lambda document: document)
    other = SignedForm(member="letter", version=2, name="the letter", hint="").encode([])
    assert not FORM.is_whole(other)


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (Corrupt("too short"), "the note contradicts itself: too short; write it again"),
        (Corrupt("the note is odd", hint="smile"), "the note is odd; smile"),
        (Format("of a new kind"), "the note: of a new kind"),
        (Unsupported("of a new kind"), "the note: of a new kind"),
    ],
    ids=range(4),
)
def test_what_its_reader_finds_is_said_of_the_document(error: TreeringError, shown: str) -> None:
    def read(_: Any) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        FORM.read(DATA, read)
    assert str(caught.value) == shown


def test_parts() -> None:
    table = array("Q", [0, 1, 2**64 - 1])
    assert decode_checksums(encode_checksums(table)) == table
    assert check_texts(["a"], "the list") == ["a"]
    for broken in (lambda: check_texts(["a", 1], "the list"), lambda: check_name(re.compile("a"), "b", "it")):
        with pytest.raises(Corrupt):
            broken()
    assert read_free_json({"a": {"b": [1]}}, "a", "it") == {"b": [1]}
    with pytest.raises(Corrupt):
        read_free_json({"a": [1]}, "a", "it")
