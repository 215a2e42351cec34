"""One judgement of casts, whichever call makes them: values change by rounding alone, and kinds are compared first."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import treering
from tests import reads
from tests.command import ended
from treering import KeyMap, KeyRule
from treering.errors import MismatchError, NotFoundError, TreeringError, UnsupportedError

OTHER_KINDS = [
    ([300.0], "float32", "int8"),
    ([2.5], "float32", "uint8"),
    ([np.nan], "float64", "int64"),
    ([3 + 4j], "complex128", "float64"),
    ([1, 0], "int32", "bool"),
    ([-1], "int8", "uint8"),
    ([5], "datetime64[s]", "int64"),
    ([5], "int64", "datetime64[s]"),
    ([5], "datetime64[s]", "timedelta64[s]"),
    ([5], "timedelta64[s]", "float64"),
    ([1], "timedelta64[Y]", "timedelta64[D]"),
]
LOST_VALUES = [
    ([1, 300], "int32", "int8"),
    ([1.0, 1e300], "float64", "float32"),
    ([1.0, 1e6], "float32", "float8_e4m3fn"),
    ([0, 1], "datetime64[s]", "datetime64[D]"),
]
ROUNDED = [
    ([0.1, np.inf, np.nan, -0.0], "float64", "float32"),
    ([300.0], "float32", "float8_e4m3fn"),
    ([7, -3], "int64", "int16"),
    ([1 + 0.1j], "complex128", "complex64"),
    ([86_400, "NaT"], "datetime64[s]", "datetime64[D]"),
]
MAPS: dict[str, Callable[[Path, Any, KeyMap], Any]] = {
    "load": lambda path, tree, names: treering.load(path / "a", key_map=names),
    "open": lambda path, tree, names: _read(path / "a", names),
    "convert": lambda path, tree, names: _convert(path, key_map=names),
    "export": lambda path, tree, names: _export(path, tree, key_map=names.inverse()),
}
DTYPES: dict[str, Callable[[Path, Any, str], Any]] = {
    "convert": lambda path, tree, to: _convert(path, dtype=to),
    "command": lambda path, tree, to: _command(path, to),
    "hf": lambda path, tree, to: _export(path, tree, to="hf", dtype=to),
}


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def _read(path: Path, names: KeyMap) -> Any:
    with treering.open(path, key_map=names) as opened:
        return {"w": opened["w"][...]}


def _convert(path: Path, **options: Any) -> Any:
    treering.convert(path / "a", path / "b", **options)
    return treering.load(path / "b")


def _command(path: Path, to: str) -> Any:
    return None if ended("convert", path / "a", path / "b", "--dtype", to) else treering.load(path / "b")


def _export(path: Path, tree: Any, **options: Any) -> Any:
    place = path / options.get("to", "b")
    treering.export(place, tree, **options)
    return treering.load(place)


def saved(path: Path, values: list[Any], dtype: str) -> dict[str, np.ndarray[Any, Any]]:
    tree = {"w": np.array(values, dtype_of(dtype))}
    treering.save(path / "a", tree)
    return tree


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("values", "before", "after"), OTHER_KINDS)
def test_another_kind_is_refused_before_a_byte_is_read(
    values: list[Any], before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = saved(tmp_path, values, before)
    reads.act_before_reads(monkeypatch, lambda _: pytest.fail("something is read"))
    with pytest.raises(MismatchError, match=f"wanted {after}".replace("[", r"\[")):
        treering.load(tmp_path / "a", {"w": np.zeros(len(values), after)}, cast=True)
    names = KeyMap([KeyRule("w", "w", cast=(before, after))])
    for call in MAPS.values():
        with pytest.raises(MismatchError, match=r"casts from .*, which holds another kind of number"):
            call(tmp_path, tree, names)
    for name in ("convert", "hf") if "float" not in after else ():
        with pytest.raises(UnsupportedError, match="dtype"):
            DTYPES[name](tmp_path, tree, after)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


@pytest.mark.parametrize(("values", "before", "after"), LOST_VALUES)
def test_a_value_that_does_not_fit_is_refused(values: list[Any], before: str, after: str, tmp_path: Path) -> None:
    tree = saved(tmp_path, values, before)
    with pytest.raises(MismatchError, match="does not fit"):
        treering.load(tmp_path / "a", {"w": np.zeros(len(values), dtype_of(after))}, cast=True)
    names = KeyMap([KeyRule("w", "w", cast=(before, after))])
    for call in MAPS.values():
        with pytest.raises(MismatchError, match="does not fit"):
            call(tmp_path, tree, names)
    for name, each in DTYPES.items() if "float" in after else ():
        if name == "command":
            assert each(tmp_path, tree, after) is None
        else:
            with pytest.raises(TreeringError, match="does not fit"):
                each(tmp_path, tree, after)
    for name in ("b", "hf"):
        with pytest.raises(NotFoundError):
            treering.load(tmp_path / name)


@pytest.mark.parametrize(("values", "before", "after"), ROUNDED)
def test_every_call_rounds_alike(values: list[Any], before: str, after: str, tmp_path: Path) -> None:
    tree = saved(tmp_path, values, before)
    wanted = treering.load(tmp_path / "a", {"w": np.zeros(len(values), dtype_of(after))}, cast=True)["w"]
    assert wanted.dtype == dtype_of(after)
    names = KeyMap([KeyRule("w", "w", cast=(before, after))])
    calls = [functools.partial(call, tmp_path, tree, names) for call in MAPS.values()]
    if "float" in before:
        calls += [functools.partial(each, tmp_path, tree, after) for each in DTYPES.values()]
    for number, call in enumerate(calls):
        found = call()
        assert (found["w"].dtype, np.asarray(found["w"]).tobytes()) == (wanted.dtype, wanted.tobytes())
        if (tmp_path / "b").exists():
            (tmp_path / "b").rename(tmp_path / f"b{number}")
