"""Keys that are chosen to have one hash: refused by readers and by `save`, in time in proportion to them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import treering
from tests.checkpoint.documents import document_of, signed
from torture.quadratic import colliding_pairs
from treering._codec.documents import have_one_hash
from treering._format.document import parse_index
from treering.errors import Corrupt, Unsupported

INTS = [number * (2**61 - 1) for number in range(1, 40_001)]
PAIRS = list(colliding_pairs(20_000))


def test_the_pairs_collide() -> None:
    assert len(set(map(hash, PAIRS[:100]))) == 1
    assert len(set(map(str, PAIRS))) == len(PAIRS)  # a set of the pairs themselves takes quadratic time


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (INTS, True),
        (PAIRS, True),
        (INTS[:64], False),
        (INTS[:65], True),
        (INTS[:1] * 1000, False),
        ([2.0**power for power in range(-1000, 1000)], False),
        (list(range(-(2**15), 2**15)), False),
        ([(a, b) for a in range(150) for b in range(150)], False),
        ([number << 40 for number in range(50_000)], False),
        (["k"] * 100, False),
    ],
)
def test_only_chosen_values_collide(values: list[Any], *, found: bool) -> None:
    start = time.process_time()
    assert have_one_hash(values) is found
    assert time.process_time() - start < 1


def test_an_index_of_such_keys_is_refused_at_once(tmp_path: Path) -> None:
    treering.save(tmp_path / "ckpt", {5: None})
    document = document_of(tmp_path / "ckpt")
    for keys in (
        [{"int": hex(number)} for number in INTS],
        [{"tuple": [{"int": hex(one) if one else "0"} for one in pair]} for pair in PAIRS],
    ):
        document["structure"] = [{"node": "dict", "keys": keys}, len(keys)]
        document["leaves"] = {"key": [f"k{number}" for number in range(len(keys))], "type": [0] * len(keys)}
        document["values"] = [None] * len(keys)
        data = signed(document)
        start = time.process_time()
        with pytest.raises(Corrupt, match="have one hash"):
            parse_index(data)
        assert time.process_time() - start < 3


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="have one hash"):
        treering.save(tmp_path / "ckpt", dict.fromkeys(INTS[:100], 1))
    assert not (tmp_path / "ckpt" / "treering.json").exists()
    treering.save(tmp_path / "ckpt", dict.fromkeys(INTS[:64], 1))
    assert treering.load(tmp_path / "ckpt") == dict.fromkeys(INTS[:64], 1)
