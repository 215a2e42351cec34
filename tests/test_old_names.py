"""Options that an earlier version had are refused by a TypeError that names the new one."""

import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import treering as tr

CALLS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "save form": (lambda path: tr.save(path, {}, form="hf"), "no option 'form': call treering.export"),  # type: ignore[call-arg]
    "save dtype": (lambda path: tr.save(path, {}, dtype="float16"), "pass it to treering.export"),  # type: ignore[call-arg]
    "save key_map": (lambda path: tr.save(path, {}, key_map=None), "pass it to treering.export"),  # type: ignore[call-arg]
    "load": (lambda path: tr.load(path, {}, rename={}), "no option 'rename': pass the dict as key_map="),  # type: ignore[call-overload]
    "convert": (lambda path: tr.convert(path, target=path), "no option 'target': it is called path"),  # type: ignore[call-arg]
    "Run.load": (lambda path: tr.Run(path).load(rename={}), "pass the dict as key_map="),  # type: ignore[call-overload]
    "Run.save": (
        lambda path: tr.Run(path).save(1, {}, overwrite=True),  # type: ignore[call-arg]
        "no option 'overwrite': it is called rollback",
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_moved_option_is_named(call: str, tmp_path: Path) -> None:
    door, said = CALLS[call]
    with pytest.raises(TypeError, match=said):
        door(tmp_path / "a")
    assert not list(tmp_path.iterdir())


OLD_ERRORS = {"NotFound": "NotFoundError", "Timeout": "TimedOutError", "StoreFailed": "StoreError"}
OLD_WARNINGS = {"KeptOnHost": "KeptOnHostWarning", "NotFenced": "NotFencedWarning"}


@pytest.mark.parametrize("name", OLD_ERRORS | OLD_WARNINGS)
def test_an_old_name_of_an_error_leads_to_the_class(name: str) -> None:
    new = (OLD_ERRORS | OLD_WARNINGS)[name]
    with pytest.warns(DeprecationWarning, match=f"treering.errors.{name} is called {new} now"):
        found = getattr(tr.errors, name)
    assert found is getattr(tr.errors, new)


def test_an_except_clause_of_before_still_catches(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match="NotFoundError"), pytest.raises(tr.errors.NotFound):  # type: ignore[attr-defined]
        tr.load(tmp_path / "nothing")


def test_every_error_ends_as_those_of_python_and_shadows_none() -> None:
    for name in tr.errors.__all__:
        found = getattr(tr.errors, name)
        assert name.endswith("Warning" if issubclass(found, Warning) else "Error")
        assert not hasattr(builtins, name)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = tr.errors.Nothing  # type: ignore[attr-defined]
