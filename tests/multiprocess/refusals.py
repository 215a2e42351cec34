"""Workers of `test_refusals`: joint saves and loads that cannot be done, and ends that all processes must hear of."""

from __future__ import annotations

import datetime
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import treering as tr
from tests.multiprocess import trees
from tests.multiprocess.jobs import hear, say
from tests.multiprocess.meetings import told
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves

_GENEROUS = 60.0
_ITEMS = np.arange(24 * 24, dtype=np.float32).reshape(24, 24)


def tree(number: int = 0, **more: Any) -> dict[str, Any]:
    """Return a tree with an array over all processes."""
    by_rows = trees.spread("line rows", jax.devices(), 2)
    return {"w": trees.placed(_ITEMS + number, by_rows), "step": number} | more


def _value(path: Path) -> list[Any]:
    """Return what stands at a path, as this process alone reads it."""
    found = tr.load(path)
    return [found["step"], float(np.asarray(found["w"])[0, 0])]


class Door:
    """One of the two forms in which trees are saved."""

    def __init__(self, base: Path, form: str) -> None:
        self.path = base / form
        self._form = form

    def save(self, state: Any, where: str = "", **options: Any) -> dict[str, Any]:
        """Save, and tell what came of it."""
        path = self.path.with_name(self.path.name + where)
        overwrite = {"overwrite": True} if self._form == "ckpt" else {}
        options = {"timeout": _GENEROUS} | overwrite | options
        work: Callable[..., None] = tr.save if self._form == "ckpt" else tree_serialize_leaves
        return told(lambda: work(os.fspath(path), state, **options))

    def value(self, where: str = "") -> list[Any]:
        """Return what stands there."""
        return _value(self.path.with_name(self.path.name + where))

    def load(self, where: str = "") -> dict[str, Any]:
        """Load by all processes, and tell what came of it."""
        path = os.fspath(self.path.with_name(self.path.name + where))
        crossed = trees.spread("line columns", jax.devices(), 2)
        shardings = {"w": crossed, "step": None}
        if self._form == "ckpt":
            return told(lambda: float(tr.load(path, shardings=shardings, timeout=_GENEROUS)["w"].sum()))
        return told(lambda: float(tree_deserialize_leaves(path, shardings=shardings, timeout=_GENEROUS)["w"].sum()))


def refused(folder: str) -> dict[str, dict[str, Any]]:
    """Try what cannot be done, then what can, in both forms; tell what came of each."""
    return {form: _refused(folder, form) for form in ("ckpt", "leaves")} | {"files": file_doors(folder)}


def _refused(folder: str, form: str) -> dict[str, Any]:
    door = Door(Path(folder), form)
    number = jax.process_index()
    said: dict[str, Any] = {"first": door.save(tree(1))}
    if form == "ckpt":
        said["exists"] = door.save(tree(2), overwrite=False)
    crossed = trees.placed(_ITEMS, trees.spread("line columns", jax.devices(), 2))
    said["other sharding"] = door.save(tree(2) if number != 2 else tree(2) | {"w": crossed})
    said["other shape"] = door.save(tree(2, extra=np.zeros(3 + (number == 3))))
    said["more leaves"] = door.save(tree(2, extra=[np.zeros(3)] * (1 + (number == 1))))
    said["unsupported in 1"] = door.save(tree(2, when=datetime.date.min if number == 1 else "then"))
    said["unsupported in 0"] = door.save(tree(2, when=datetime.date.min if number == 0 else "then"))
    said["differs"] = door.save(tree(2, noise=np.full(5, number // 2)), host_local="equal")
    said["value"] = door.value()
    said["equal"] = door.save(tree(3, noise=np.full(5, 4)), host_local="equal")
    said["of process 0"] = door.save(tree(4, noise=np.full(5, number)))
    said["noise"] = np.asarray(tr.load(door.path)["noise"]).tolist()
    said["nonsense"] = told(lambda: tr.save(door.path, tree(5), timeout=-1))
    done: list[tuple[int, int]] = []
    said["progress"] = door.save(tree(5), progress=lambda *pair: done.append(pair))
    said["done"] = done
    said["this"] = door.save({"mine": np.full(3, number), "step": 1, "w": _ITEMS}, f" {number}", processes="this")
    said["mine"] = np.asarray(tr.load(door.path.with_name(f"{form} {number}"))["mine"]).tolist()
    said["this, of all"] = door.save(tree(5), f" all {number}", processes="this")
    said["host only"] = door.save({"a": _ITEMS + number, "step": 1, "w": _ITEMS}, " host")
    said["host"] = float(np.asarray(tr.load(door.path.with_name(f"{form} host"))["a"])[0, 0])
    said["last"] = door.value()
    return said


def damaged(folder: str) -> dict[str, list[dict[str, Any]]]:
    """Load what is whole, what is damaged where only some read it, and what only some processes see."""
    is_apart = jax.process_index() == 1
    where = " not there" if is_apart else " bad"
    said = {}
    for form in ("ckpt", "leaves"):
        door = Door(Path(folder), form)
        unshared = Door(Path(folder, "not there"), form) if is_apart else door
        said[form] = [door.load(), door.load(" bad"), unshared.load(" bad"), door.load(where), door.load()]
    return said


def file_doors(folder: str) -> dict[str, Any]:
    """Save single files, which each process does for itself; metadata and the callback of process 0."""
    base, number = Path(folder), jax.process_index()
    called: list[int] = []
    one = base / f"{number}.msgpack"
    two = base / f"{number}.safetensors"
    tr.save(one, {"a": np.full(3, number)})
    tr.save(two, {"a": np.full(3, number)})
    tr.save(base / "with metadata", tree(), metadata={"number": number})
    tree_serialize_leaves(base / "called", tree(), prefix="a.b", commit_callback=lambda: called.append(number))
    with tr.open(base / "with metadata") as opened:
        metadata = dict(opened.metadata)
    files = [tr.load(one)["a"].tolist(), tr.load(two)["a"].tolist()]
    return {"files": files, "metadata": metadata, "called": called}


def does_not_come(folder: str) -> dict[str, dict[str, Any]]:
    """Let the last process stay away from a save; it comes when the others have given up, and then all save."""
    last = jax.process_index() == jax.process_count() - 1
    doors = {form: Door(Path(folder), form) for form in ("ckpt", "leaves")}
    said: dict[str, dict[str, Any]] = {form: {"first": door.save(tree(1))} for form, door in doors.items()}
    for form, door in doors.items():
        os.environ["TREERING_TIMEOUT_S"] = "5"
        if last:
            say("stays away")
            hear()
        said[form]["without"] = door.save(tree(2), timeout=None)
        del os.environ["TREERING_TIMEOUT_S"]
        said[form]["value"] = door.value()
        say("has given up")
        hear()
        said[form]["next"] = door.save(tree(3))
        said[form]["last"] = door.value()
    return said


def races(folder: str, number: int, rounds: int) -> list[Any]:
    """Save to paths to which another job saves at the same time."""
    found = []
    for one in range(rounds):
        say(f"ready {one}")
        hear()
        found.append(told(functools.partial(tr.save, Path(folder, str(one)), tree(number), timeout=_GENEROUS)))
    return found
