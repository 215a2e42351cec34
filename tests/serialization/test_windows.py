"""A msgpack file in a bucket is read through windows, wherever their ends fall."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import treering
from tests import limits
from tests.buckets import MemoryBucket
from treering import serialization

DRAW = np.random.default_rng(0)
SIZES = (0, 1, 1500, 2049, 5000, 9000, 40_000, 3, 100_000)
TREE: dict[str, Any] = {
    "arrays": {f"a{number}": DRAW.integers(0, 255, size, np.uint8) for number, size in enumerate(SIZES)},
    "scalars": {f"s{number}": np.float64(number) for number in range(300)},
    "texts": {"long": "t" * 9000, "bytes": bytes(9000), "number": 7},
    "list": [DRAW.standard_normal((60, 70)), None, True],
}


@pytest.mark.parametrize("chunk", [1 << 30, 700, 30_000], ids=["whole", "many chunks", "few chunks"])
@pytest.mark.parametrize("window", [2100, 5000, 65536, 300_000])
def test_windows_end_anywhere(window: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limits.lower(monkeypatch, chunk_of_state_dicts=chunk)
    data = serialization.to_bytes(TREE)
    bucket = MemoryBucket()
    bucket.put("a.msgpack", data)
    limits.lower(monkeypatch, window_of_msgpack=window)
    found = treering.load(treering.bucket(bucket) / "a.msgpack")
    wanted = serialization.from_bytes(None, data)
    for part in ("arrays", "scalars"):
        assert found[part].keys() == wanted[part].keys()
        for name, value in wanted[part].items():
            assert np.array_equal(found[part][name], value)
            assert found[part][name].dtype == value.dtype
    assert found["texts"] == wanted["texts"]
    assert np.array_equal(found["list"]["0"], wanted["list"]["0"])
    assert bucket.received <= 2 * len(data) + (256 << 10)
