"""The list of steps that are left behind, and what is made of lists that nobody of ours wrote."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treering._format.run_document import SupersededSteps, encode_superseded, parse_superseded
from treering._store.run_folder import HIGHEST_STEP
from treering._values.checksums import digest
from treering.errors import Corrupt, Format

DOCUMENT = SupersededSteps(step=10, mark="0123456789abcdef", left={20: "f" * 16, 30: None})
attempts = st.none() | st.text("0123456789abcdef", min_size=16, max_size=16)


def signed(node: dict[str, Any], version: int = 1) -> bytes:
    head = f'{{"treering_left": {version}, "digest": "'
    body = '",\n' + json.dumps(node)[1:] + "\n"
    return f"{head}{digest((head.encode(), body.encode()))}{body}".encode()


def node(**changed: Any) -> dict[str, Any]:
    left = [{"step": 20, "attempt": "f" * 16}, {"step": 30, "attempt": None}]
    return {"step": 10, "mark": "0123456789abcdef", "left": left} | changed


@given(st.integers(0, 2**40), st.dictionaries(st.integers(2**40 + 1, HIGHEST_STEP), attempts, max_size=5))
def test_a_list_comes_back(step: int, left: dict[int, str | None]) -> None:
    document = SupersededSteps(step=step, mark="0" * 16, left=left)
    assert parse_superseded(encode_superseded(document)) == document


def test_what_is_signed_is_read() -> None:
    assert parse_superseded(signed(node())) == DOCUMENT


@pytest.mark.parametrize(
    "changed",
    [
        {"step": -1},
        {"step": True},
        {"step": 20},
        {"mark": "xyz"},
        {"mark": None},
        {"left": {}},
        {"left": [{"step": 20}]},
        {"left": [{"step": 20, "attempt": "short"}]},
        {"left": [{"step": 20, "attempt": 7}]},
        {"left": ["20"]},
        {"left": [20]},
        {"left": [None]},
    ],
)
def test_what_contradicts_itself_is_damage(changed: dict[str, Any]) -> None:
    with pytest.raises(Corrupt, match=r"\.run\.json\.left"):
        parse_superseded(signed(node(**changed)))


def test_one_that_was_not_written_to_its_end_is_damaged() -> None:
    data = encode_superseded(DOCUMENT)
    for end in range(len(data)):
        with pytest.raises(Corrupt):
            parse_superseded(data[:end])


def test_a_newer_one_is_refused() -> None:
    with pytest.raises(Format, match="is of version 2"):
        parse_superseded(signed(node(), version=2))
