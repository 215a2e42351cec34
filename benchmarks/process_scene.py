"""One tree of the benchmark of many processes: its files, its crews, and what makes a result right."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

import treering
from benchmarks import workloads
from benchmarks.checkpoint_peers import Orbax
from benchmarks.files import Files, contents, warm
from benchmarks.measure import Case, Work
from benchmarks.process_crew import CrewFailed, ThreadPool, crew
from benchmarks.process_peers import LIBRARIES, LibraryName
from benchmarks.process_trees import Layout, write_tree
from treering.leaves import tree_deserialize_leaves

__all__ = ["COUNTS", "Counter", "ProcessFiles", "Turn"]

COUNTS = (2, 4)
"""How many processes are compared with one."""

# It compresses gaussian values to about 0.82.
_ORBAX_LEAST = 0.7

Verb: TypeAlias = Literal["save", "load"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One save or load by all processes of a crew."""

    path: Path
    """What was written or read."""
    nbytes: int
    """Bytes of the tree."""
    done: Sequence[dict[str, Any]]
    """What each process counted: the fields of ``process_station.Done``; none if the crew failed."""
    fault: str | None
    """Why the crew failed; None if it did not."""

    def each(self, name: str) -> list[float]:
        """One field of every process."""
        return [float(process[name]) for process in self.done]


Counter: TypeAlias = Callable[[Turn], float]


class ProcessFiles:
    """A tree that crews of one and more processes save and load, and what was saved before.

    Args:
        name: A or B of ``workloads``.
        factor: scales its bytes.
        folder: where files go.
        counts: how many processes are compared with one; the most of them save what is loaded.
    """

    def __init__(self, name: str, factor: float, folder: Path, counts: Sequence[int] = COUNTS) -> None:
        self.counts = counts
        folder = folder.resolve()  # Orbax takes no relative paths
        self.work = workloads.build(name, factor)
        self.files = Files(folder / "written")
        self._folder = folder
        self._shared = folder / f"{name}.bytes"
        self._flat: dict[str, Any] = dict(workloads.flat(self.work.tree))
        self._orbax_read: set[int] = set()
        self._opened: set[ThreadPool] = set()

    def prepare(self) -> None:
        """Write the tree for all processes, and let each library save it: by many, and whole by one."""
        write_tree(self._shared, self.work.tree)
        for name in LIBRARIES:
            self._together(max(self.counts), "save", name, self.saved(name, "sharded"), "sharded")
            self._together(1, "save", name, self.saved(name, "whole"), "whole")

    def close(self) -> None:
        """Remove every file; the crews stay for the next tree."""
        self.files.clear()
        for name in LIBRARIES:
            for layout in ("sharded", "whole"):
                shutil.rmtree(self.saved(name, layout), ignore_errors=True)
        for path in (self._shared, self._shared.with_suffix(".json")):
            path.unlink(missing_ok=True)

    def saved(self, name: LibraryName, layout: Literal["sharded", "whole"]) -> Path:
        """Where ``prepare`` let a library save the tree."""
        return self._folder / f"{self.work.name}-{name}-{layout}"

    # Cases.

    def save(
        self, title: str, count: int, name: LibraryName, layout: Layout, *, counter: Counter | None = None
    ) -> Case:
        """So many processes save the tree with a library."""

        def begin() -> Work:
            path = self.files.new()
            self._ask(count, "save", name, str(path), layout)
            return lambda: self._go(count, path)

        def check(turn: Turn) -> str | None:
            return turn.fault or self._checked(count) or self._wrong_folder(name, count, turn.path)

        return Case(name=title, begin=begin, check=check, count=counter)

    def load(
        self,
        title: str,
        count: int,
        name: LibraryName,
        layout: Layout,
        *,
        saved: Literal["sharded", "whole"] = "sharded",
        counter: Counter | None = None,
    ) -> Case:
        """So many processes load what a library saved before."""

        def begin() -> Work:
            path = self.saved(name, saved)
            warm(path, self._room)
            self._ask(count, "load", name, str(path), layout)
            return lambda: self._go(count, path)

        return Case(name=title, begin=begin, check=lambda turn: turn.fault or self._checked(count), count=counter)

    @cached_property
    def _room(self) -> Any:
        return np.ones(1 << 22, np.uint8)

    # Crews.

    def _ask(self, count: int, verb: str, *arguments: Any) -> list[Any]:
        """Ask a crew that knows the tree."""
        workers = crew(count)
        if workers not in self._opened:
            workers.ask("open", str(self._shared))
            self._opened.add(workers)
        return workers.ask(verb, *arguments)

    def _go(self, count: int, path: Path) -> Turn:
        """Let a crew do what it is ready for; the time of this is that of its slowest process."""
        try:
            done, fault = crew(count).ask("go"), None
        except CrewFailed as error:
            done, fault = [], str(error)
        return Turn(path=path, nbytes=self.work.nbytes, done=done, fault=fault)

    def _checked(self, count: int) -> str | None:
        """What the processes found wrong with what they hold."""
        try:
            faults = crew(count).ask("check")
        except CrewFailed as error:
            return str(error)
        return "; ".join(f"process {number}: {fault}" for number, fault in enumerate(faults) if fault) or None

    def _together(self, count: int, verb: Verb, name: LibraryName, path: Path, layout: Layout) -> None:
        """The same as a case, outside of any clock."""
        self._ask(count, verb, name, str(path), layout)
        crew(count).ask("go")
        crew(count).ask("check")

    # Checks, by this process alone.

    def _wrong_folder(self, name: LibraryName, count: int, path: Path) -> str | None:
        """Whether one process reads the tree back."""
        match name:
            case "treering":
                return self._wrong(treering.load(path))
            case "leaves":
                return self._wrong(tree_deserialize_leaves(path, jax.sharding.Mesh(jax.devices()[:1], ("all",))))
            case "Orbax":
                return self._wrong_orbax(count, path)

    def _wrong(self, tree: workloads.Tree) -> str | None:
        return workloads.same_leaves(dict(workloads.flat(tree)), self._flat, jax.Array)

    def _wrong_orbax(self, count: int, path: Path) -> str | None:
        """Orbax reads back what so many processes saved first; of later saves the size is asked: reading takes long."""
        if count in self._orbax_read:
            size = sum(each.stat().st_size for each in contents(path))
            enough = size > _ORBAX_LEAST * self.work.nbytes
            return None if enough else f"Orbax wrote {size} bytes of {self.work.nbytes}"
        self._orbax_read.add(count)
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = workloads.mapped(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), self.work.tree
        )
        peer = Orbax()
        try:
            return self._wrong(peer.load(path, target))
        finally:
            peer.close()
