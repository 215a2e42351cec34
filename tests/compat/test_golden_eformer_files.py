"""Msgpack files that eformer wrote, plain and gzipped: read to the last bit, written again byte for byte."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering.serialization
from tests import limits
from tests.compat.golden_files import EFORMER, dtype_named
from tests.trees import assert_same

NAMES = sorted(path.stem for path in EFORMER.glob("*.msgpack"))
GZIPPED = sorted(path.name.removesuffix(".msgpack.gz") for path in EFORMER.glob("*.msgpack.gz"))


def expected_arrays(name: str) -> dict[str, np.ndarray]:
    dtypes = json.loads((EFORMER / f"{name}.expected.json").read_text(encoding="utf-8"))
    with np.load(EFORMER / f"{name}.expected.npz") as stored:
        return {key: stored[key].view(dtype_named(dtype)) for key, dtype in dtypes.items()}


def flat(tree: Any, path: tuple[str, ...] = ()) -> dict[str, Any]:
    if isinstance(tree, dict) and tree:
        return {key: leaf for name, child in tree.items() for key, leaf in flat(child, (*path, name)).items()}
    return {"/".join(path): tree}


def assert_holds_expected(tree: Any, name: str) -> None:
    leaves = flat(tree)
    for key, want in expected_arrays(name).items():
        assert_same(np.asarray(leaves.pop(key)), want)
    python = EFORMER / f"{name}.python.json"
    shown = json.loads(python.read_text(encoding="utf-8")) if python.exists() else {}
    assert {key.rpartition("/")[2]: repr(leaf) for key, leaf in leaves.items()} == shown


def test_no_golden_file_is_missing() -> None:
    assert NAMES == ["mp_chunked", "mp_dtypes", "mp_intkeys", "mp_nested", "mp_python"]
    assert GZIPPED == ["mp_dtypes", "mp_intkeys", "mp_nested", "mp_python"]


@pytest.mark.parametrize("name", NAMES)
def test_reading_gives_the_expected_values(name: str) -> None:
    data = (EFORMER / f"{name}.msgpack").read_bytes()
    assert_holds_expected(treering.serialization.msgpack_restore(data), name)


@pytest.mark.parametrize("name", GZIPPED)
def test_reading_the_gzipped_form_gives_the_same(name: str) -> None:
    packed = (EFORMER / f"{name}.msgpack.gz").read_bytes()
    plain = (EFORMER / f"{name}.msgpack").read_bytes()
    assert treering.serialization.decompress_bytes(packed) == plain
    assert_same(
        treering.serialization.from_compressed_bytes(None, packed), treering.serialization.msgpack_restore(plain)
    )


@pytest.mark.parametrize("name", NAMES)
def test_what_was_read_writes_the_same_bytes_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = (EFORMER / f"{name}.msgpack").read_bytes()
    if name == "mp_chunked":
        limits.lower(monkeypatch, chunk_of_state_dicts=64)
    assert treering.serialization.to_bytes(treering.serialization.msgpack_restore(data)) == data


@pytest.mark.parametrize("name", GZIPPED)
def test_our_gzip_holds_the_same_bytes(name: str) -> None:
    plain = (EFORMER / f"{name}.msgpack").read_bytes()
    state = treering.serialization.msgpack_restore(plain)
    assert gzip.decompress(treering.serialization.to_compressed_bytes(state)) == plain


@pytest.mark.parametrize("name", NAMES)
def test_reading_from_disk_gives_the_expected_values(name: str, tmp_path: Path) -> None:
    path = tmp_path / "state.msgpack"
    path.write_bytes((EFORMER / f"{name}.msgpack").read_bytes())
    assert_holds_expected(treering.serialization.load_from_file(None, path), name)
