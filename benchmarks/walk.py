"""Command line: ``python -m benchmarks walk [--climbs] [--json]``.

How far a call walks through treering: which modules it enters, how many calls it makes, and how deep it stands when it
moves data. It measures no time, so the figures of two runs differ by a call or two at most.

Each way is walked twice on a tree of four arrays (one of them of 1 MiB) and three Python values, the second time under
a profile function and to a new path. What is counted:

- *Modules*: files of treering of which at least one function began. Code that a dataclass generates has no file.
- *Calls*: times that a Python function of treering began, and times that a generator of treering was resumed.
- *Climbs*: such calls where the caller, too, is a function of treering and stands on a lower floor. The floors are the
  first contract of imports in ``pyproject.toml``; what it does not name, as the package itself, is above all of them.
  A generator that is resumed from below climbs each time. What comes back through a function of another package, as a
  callback of obstore or `map` of jax does, is not a climb; a builtin has no frame, so what it calls is one.
- *Frames*: functions of treering on the stack at the first system call that writes data (``write`` and its like), or
  reads data where the way is a load (``preadv``; headers and indexes are read by ``pread`` and ``read``).

All threads count, except that `Run.save` counts what its caller's thread does before it returns. Python 3.11 can
profile the caller's thread only; there the ways leave no work to others.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import sys
import tempfile
import threading
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp

import treering
from benchmarks.checkpoint_peers import Orbax
from benchmarks.report import table
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves

__all__ = ["WAYS", "Walk", "Way", "main", "walk"]

_ROOT = str(Path(treering.__file__).parent) + os.sep
_CONTRACTS = Path(__file__).parents[1] / "pyproject.toml"
_WRITES = frozenset(getattr(os, name, None) for name in ("write", "writev", "pwrite", "pwritev"))
_READS = frozenset(getattr(os, name, None) for name in ("readv", "preadv"))
_HEAD = ("way", "modules", "calls", "climbs", "frames at the data")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Way:
    """One public function, and how far it may walk."""

    name: str
    prepare: Callable[[Path, Any], Callable[[str], object]]
    """Makes what the function needs, and returns the call; its argument is a name that nothing has yet."""
    goals: Mapping[str, int] = field(default_factory=dict)
    """The most that is wanted of a figure, by its name."""
    reads: bool = False
    """Whether its data is read."""
    all_threads: bool = True
    """Whether threads other than the caller's count."""
    needs: str = "treering"
    """A package that it asks for."""


@dataclass(slots=True)
class Walk:
    """What one call did."""

    modules: Counter[str] = field(default_factory=Counter)
    """Calls by the module that was entered."""
    climbs: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Climbs by the module of the caller, the module that was entered, and the function in it."""
    frames: int | None = None
    """Frames of treering at the first system call for data; None: there was none."""

    def figures(self) -> dict[str, int | None]:
        """The figures of the table."""
        calls, climbs = self.modules.total(), self.climbs.total()
        return {"modules": len(self.modules), "calls": calls, "climbs": climbs, "frames": self.frames}


def main(arguments: Sequence[str]) -> int:
    """Walk all ways and print how far each went."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks walk", description=sys.modules[__name__].__doc__)
    parser.add_argument("--climbs", action="store_true", help="list each climb below the table")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    given = parser.parse_args(arguments)
    ways = [way for way in WAYS if importlib.util.find_spec(way.needs)]
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        found = {way: walk(way, Path(folder)) for way in ways}
    if given.json:
        print(json.dumps({"benchmark": "walk", "ways": [_as_json(way, walked) for way, walked in found.items()]}))
        return 0
    lines = ["walk: how far a call goes through treering, and the goals", ""]
    lines += table(_HEAD, (_row(way, walked) for way, walked in found.items()))
    lines += [f"{way.name}: left out, {way.needs} is not installed" for way in WAYS if way not in found]
    if given.climbs:
        for way, walked in found.items():
            lines += ["", f"climbs of {way.name}", *_climb_lines(walked)]
    print("\n".join(lines))
    return 0


def walk(way: Way, folder: Path) -> Walk:
    """Walk one way twice in a folder, and return what the second call did."""
    floors, walked = _floors(), Walk()
    data = _READS if way.reads else _WRITES

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and (module := _module(frame)):
            walked.modules[module] += 1
            caller = frame.f_back and _module(frame.f_back)
            if caller and _floor(floors, module) > _floor(floors, caller):
                walked.climbs[caller, module, frame.f_code.co_qualname] += 1
        elif event == "c_call" and walked.frames is None and argument in data and _module(frame):
            walked.frames = sum(map(bool, map(_module, _stack(frame))))

    call = way.prepare(folder, _tree())
    _wait(call("first"))
    with _profiled(profile, way):
        returned = call("second")
    _wait(returned)
    return walked


def _wait(returned: object) -> None:
    """Wait for the saves of a run, which would be counted with what is walked next."""
    if isinstance(returned, treering.Run):
        returned.wait()


@contextmanager
def _profiled(profile: Callable[[FrameType, str, Any], None], way: Way) -> Iterator[None]:
    """Call a function at each call and return, and let no collector call anything in the meantime."""
    everywhere = way.all_threads and sys.version_info >= (3, 12)
    switch: Callable[[Any], None] = threading.setprofile_all_threads if everywhere else sys.setprofile
    gc.collect()
    gc.disable()
    switch(profile)
    try:
        yield
    finally:
        switch(None)
        gc.enable()


def _module(frame: FrameType) -> str:
    """The module of treering that a frame is of, such as ``_store.posix.store``; else ``""``."""
    file = frame.f_code.co_filename
    if not file.startswith(_ROOT):
        return ""
    return file[len(_ROOT) :].removesuffix(".py").removesuffix(f"{os.sep}__init__").replace(os.sep, ".")


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _floors() -> dict[str, int]:
    """The floor of each child of the package, the lowest first."""
    contracts = tomllib.loads(_CONTRACTS.read_text())["tool"]["importlinter"]["contracts"]
    layers = next(each["layers"] for each in contracts if each["type"] == "layers")
    return {
        name.strip().removeprefix("treering."): floor
        for floor, layer in enumerate(reversed(layers))
        for name in layer.replace("|", ":").split(":")
    }


def _floor(floors: Mapping[str, int], module: str) -> int:
    return floors.get(module.partition(".")[0], len(floors))


def _row(way: Way, walked: Walk) -> list[str]:
    cells = [way.name]
    for name, figure in walked.figures().items():
        goal = f" (<= {way.goals[name]:,})" if name in way.goals else ""
        cells.append("" if figure is None else f"{figure:,}{goal}")
    return cells


def _as_json(way: Way, walked: Walk) -> dict[str, Any]:
    climbs = [{"from": one, "to": other, "function": name, "times": n} for (one, other, name), n in _sorted(walked)]
    return {
        "way": way.name,
        **walked.figures(),
        "goals": way.goals,
        "calls_by_module": dict(walked.modules.most_common()),
        "climbs_by_function": climbs,
    }


def _climb_lines(walked: Walk) -> list[str]:
    return [f"{times:>5} {caller} -> {module}, {function}" for (caller, module, function), times in _sorted(walked)]


def _sorted(walked: Walk) -> list[tuple[tuple[str, str, str], int]]:
    return walked.climbs.most_common()


def _tree() -> dict[str, Any]:
    params = {"w": jnp.ones((512, 512)), "b": jnp.zeros(8)}
    return {"params": params, "opt": [jnp.zeros(3), jnp.ones(3)], "step": 3, "rate": 0.1, "name": "walk"}


def _save(folder: Path, tree: Any) -> Callable[[str], object]:
    return lambda name: treering.save(folder / f"save-{name}", tree)


def _load(folder: Path, tree: Any) -> Callable[[str], object]:
    treering.save(folder / "load", tree)
    return lambda _: treering.load(folder / "load", like=tree)


def _run_save(folder: Path, tree: Any) -> Callable[[str], object]:
    run = treering.Run(folder / "run")

    def save(name: str) -> treering.Run:
        run.save(int(name == "second"), tree)
        return run

    return save


def _bucket_save(folder: Path, tree: Any) -> Callable[[str], object]:
    from obstore.store import MemoryStore

    from treering._store.objects.client import ObstoreClient

    bucket = treering.bucket(ObstoreClient(MemoryStore(), f"s3://walk-{folder.name}"))
    return lambda name: treering.save(bucket / name, tree)


def _leaves_save(folder: Path, tree: Any) -> Callable[[str], object]:
    return lambda name: tree_serialize_leaves(folder / f"leaves-{name}", tree)


def _leaves_load(folder: Path, tree: Any) -> Callable[[str], object]:
    tree_serialize_leaves(folder / "leaves", tree)
    return lambda _: tree_deserialize_leaves(folder / "leaves")


def _convert(folder: Path, tree: Any) -> Callable[[str], object]:
    source, peer = folder / "orbax", Orbax()
    peer.save(source, jax.tree.map(jnp.asarray, {"params": tree["params"], "opt": tree["opt"]}))
    peer.close()
    return lambda name: treering.convert(source, folder / f"converted-{name}")


WAYS = (
    Way(name="save", prepare=_save, goals={"modules": 36, "climbs": 6}),
    Way(name="load", prepare=_load, goals={"modules": 40, "climbs": 6}, reads=True),
    Way(name="Run.save, its caller's thread", prepare=_run_save, all_threads=False),
    Way(name="bucket save", prepare=_bucket_save, goals={"modules": 42, "climbs": 8}, needs="obstore"),
    Way(name="leaves save", prepare=_leaves_save, goals={"modules": 40, "climbs": 10}),
    Way(name="leaves load", prepare=_leaves_load, reads=True),
    Way(name="convert of four Orbax arrays", prepare=_convert, goals={"calls": 900}),
)
"""All ways. The goals are those of the table that `benchmarks/README.md` explains."""
