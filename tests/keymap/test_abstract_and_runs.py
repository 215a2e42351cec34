"""Headers and steps of runs, seen through a key map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import treering
from tests import reads
from treering import KeyMap, KeyRule
from treering.errors import MismatchError, UnsupportedError

HEADS = 2
MAP = KeyMap([
    KeyRule("{i}.q_proj", "q/kernel", unflatten=(0, HEADS), transpose=(2, 0, 1), stack={"i": 0}),
    KeyRule("{i}.o_proj", "o/kernel", unflatten=(1, HEADS), transpose=(1, 2, 0), stack={"i": 0}),
    KeyRule("step", "step"),
])  # fmt: skip
QUERIES = np.arange(3 * 8 * 5, dtype=np.float32).reshape(3, 8, 5)
OUTPUTS = np.arange(3 * 5 * 8, dtype=np.float32).reshape(3, 5, 8)
STORED: dict[str, Any] = {"step": 7}
for number in range(3):
    STORED |= {f"{number}.q_proj": QUERIES[number], f"{number}.o_proj": OUTPUTS[number]}


def assert_mapped(found: dict[str, Any]) -> None:
    np.testing.assert_array_equal(found["q"]["kernel"], QUERIES.reshape(3, HEADS, 4, 5).transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(found["o"]["kernel"], OUTPUTS.reshape(3, 5, HEADS, 4).transpose(0, 2, 3, 1))
    assert found["step"] == 7


def test_an_abstract_tree_is_that_of_the_mapped_one(tmp_path: Path) -> None:
    treering.save(tmp_path / "a", STORED)
    found = treering.abstract(tmp_path / "a", key_map=MAP)
    assert found == {
        "q": {"kernel": jax.ShapeDtypeStruct((3, 5, HEADS, 4), "float32")},
        "o": {"kernel": jax.ShapeDtypeStruct((3, HEADS, 4, 5), "float32")},
        "step": 7,
    }
    assert list(treering.abstract(tmp_path / "a", key_map=MAP, only="q")) == ["q"]
    assert_mapped(treering.load(tmp_path / "a", found, key_map=MAP))
    with pytest.raises(MismatchError, match="step: no rule names it"):
        treering.abstract(tmp_path / "a", key_map=KeyMap(MAP.rules[:2]))
    with pytest.raises(UnsupportedError, match=r"key_map= is a treering\.KeyMap"):
        treering.abstract(tmp_path / "a", key_map="map.toml")  # type: ignore[arg-type]


def test_a_run_loads_its_steps_through_a_map(tmp_path: Path) -> None:
    with treering.Run(tmp_path / "run") as run:
        run.save(1, STORED)
        assert_mapped(run.load(key_map=MAP))
        assert_mapped(run.load(1, treering.abstract(tmp_path / "run", key_map=MAP), key_map=MAP))
        with pytest.raises(MismatchError, match="step: no rule names it"):
            run.load(key_map=KeyMap(MAP.rules[:2]))


def test_heads_are_read_in_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of many heads is no read for each head."""
    boxes: list[int] = []

    reads.act_before_reads(monkeypatch, lambda requests: boxes.extend(len(request.boxes) for request in requests))
    treering.save(tmp_path / "a", STORED)
    assert_mapped(treering.load(tmp_path / "a", key_map=MAP))
    assert boxes == [1] * 6


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"unflatten": (0, 3)}, "unflattens axis 0 into 3 equal parts, its shape is (8, 5)"),
        ({"unflatten": (2, 2)}, "unflattens axis 2 into 2 equal parts"),
        ({"flatten": (0, 4)}, "flattens axis 0 of the length 4 and the next one"),
        ({"flatten": (1, 5)}, "flattens axis 1 of the length 5 and the next one"),
        ({"unflatten": (0, 2), "transpose": (1, 0)}, "is for 2 axes"),
    ],
)
def test_what_does_not_fit_is_named(options: dict[str, Any], problem: str, tmp_path: Path) -> None:
    treering.save(tmp_path / "a", {"w": QUERIES[0]})
    with pytest.raises(MismatchError) as caught:
        treering.load(tmp_path / "a", key_map=KeyMap([KeyRule("w", "w", **options)]))
    assert problem in str(caught.value)


@pytest.mark.parametrize("name", ["unflatten", "flatten"])
@pytest.mark.parametrize("given", [(0,), (-1, 2), (0, 0), (0, True), 3, (0, 2, 2)])
def test_a_pair_that_is_none_is_refused(name: str, given: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"{name}=.* is not a pair of an axis"):
        KeyRule("w", "w", **{name: given})
