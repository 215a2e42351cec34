"""Options that an earlier version had are refused by a TypeError that names the new one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import treering as tr

CALLS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "save form": (lambda path: tr.save(path, {}, form="hf"), "no option 'form': treering.export has it"),  # type: ignore[call-arg]
    "save dtype": (lambda path: tr.save(path, {}, dtype="float16"), "treering.export has it"),  # type: ignore[call-arg]
    "save key_map": (lambda path: tr.save(path, {}, key_map=None), "treering.export has it"),  # type: ignore[call-arg]
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
