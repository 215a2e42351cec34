"""Three libraries that many processes call together: ours in its two forms, and Orbax."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, get_args

import jax

import treering
from benchmarks import workloads
from benchmarks.process_trees import Layout, shardings, targets
from benchmarks.workloads import Tree
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves

__all__ = ["LIBRARIES", "Library", "LibraryName", "library"]

LibraryName: TypeAlias = Literal["treering", "leaves", "Orbax"]
LIBRARIES: tuple[LibraryName, ...] = get_args(LibraryName)


class Library(Protocol):
    """Saves and loads a tree that lies on the devices of many processes; all of them call."""

    def save(self, path: Path, tree: Tree) -> None:
        """Save to a path where nothing is; it is there when this returns."""

    def loader(self, path: Path, tree: Tree, layout: Layout) -> Callable[[], Tree]:
        """Make what to load into; calling what this returns loads, and waits until every array is there."""


class _Checkpoints(Library):
    """``treering.save`` and ``treering.load``."""

    def save(self, path: Path, tree: Tree) -> None:
        treering.save(path, tree)

    def loader(self, path: Path, tree: Tree, layout: Layout) -> Callable[[], Tree]:
        like = targets(tree, layout)
        return lambda: jax.block_until_ready(treering.load(path, like))


class _Leaves(Library):
    """``treering.leaves``."""

    def save(self, path: Path, tree: Tree) -> None:
        tree_serialize_leaves(path, tree)

    def loader(self, path: Path, tree: Tree, layout: Layout) -> Callable[[], Tree]:
        places = {key.replace("/", "."): each for key, each in shardings(tree, layout).items()}
        over = workloads.mesh()
        return lambda: jax.block_until_ready(tree_deserialize_leaves(path, over, shardings=places))


class _Orbax(Library):
    """Orbax' ``StandardCheckpointer``, waited for."""

    @cached_property
    def _peer(self) -> Any:
        # It takes a second to import, and not every crew is asked for it.
        from benchmarks.checkpoint_peers import Orbax

        return Orbax()

    def save(self, path: Path, tree: Tree) -> None:
        self._peer.save(path, tree)

    def loader(self, path: Path, tree: Tree, layout: Layout) -> Callable[[], Tree]:
        target, load = targets(tree, layout), self._peer.load
        return lambda: load(path, target)


def library(name: LibraryName) -> Library:
    """A library by its name."""
    match name:
        case "treering":
            return _Checkpoints()
        case "leaves":
            return _Leaves()
        case "Orbax":
            return _Orbax()
