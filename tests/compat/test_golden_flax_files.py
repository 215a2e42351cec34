"""Files that flax wrote: read to the last bit, written again byte for byte."""

from __future__ import annotations

from pathlib import Path

import flax.serialization
import pytest

import treering.serialization
from tests import limits
from tests.compat.golden_files import flax_file, flax_names
from tests.trees import assert_same, fingerprint


def test_no_golden_file_is_missing() -> None:
    assert len(flax_names()) >= 23


@pytest.mark.parametrize("name", flax_names())
def test_flax_itself_agrees_with_the_expected_state(name: str) -> None:
    case = flax_file(name)
    assert_same(flax.serialization.msgpack_restore(case.data), case.state)


@pytest.mark.parametrize("name", flax_names())
def test_reading_gives_the_expected_state(name: str) -> None:
    case = flax_file(name)
    assert_same(treering.serialization.msgpack_restore(case.data), case.state)


@pytest.mark.parametrize("name", flax_names())
def test_writing_the_expected_state_gives_the_same_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = flax_file(name)
    limits.lower(monkeypatch, chunk_of_state_dicts=case.max_chunk_size)
    before = fingerprint(case.state)
    assert treering.serialization.msgpack_serialize(case.state, in_place=True) == case.data
    assert fingerprint(case.state) == before


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", flax_names())
def test_what_was_read_writes_the_same_bytes_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = flax_file(name)
    limits.lower(monkeypatch, chunk_of_state_dicts=case.max_chunk_size)
    state = treering.serialization.msgpack_restore(case.data)
    if case.writer == "to_bytes":
        assert treering.serialization.to_bytes(state) == case.data
    assert treering.serialization.msgpack_serialize(state, in_place=True) == case.data


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mapped", [False, True], ids=["read", "mapped"])
@pytest.mark.parametrize("name", flax_names())
def test_reading_from_disk_gives_the_expected_state(name: str, mapped: bool, tmp_path: Path) -> None:
    case = flax_file(name)
    path = tmp_path / "state.msgpack"
    path.write_bytes(case.data)
    assert_same(treering.serialization.load_from_file(None, path, mapped=mapped), case.state)
