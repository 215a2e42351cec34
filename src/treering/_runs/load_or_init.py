"""A checkpoint and a function that makes a fresh tree -> the tree: loaded where it is stored, initialised where not."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, Final, cast

import jax
from jax.sharding import NamedSharding, Sharding

from treering._checkpoint.forms import read_source
from treering._checkpoint.joint_load import LoadGroup, spans_processes
from treering._checkpoint.load import LoadOptions
from treering._printable import kind_of
from treering._runs.iterators import load_items, restore_states
from treering._tree.flatten import flatten_like
from treering._tree.likeness import Wording, unflatten
from treering._tree.placement import aval_of, current_mesh, resolve_shardings, sharding_of
from treering.errors import MismatchError, UnsupportedError

_WORDING: Final = Wording("init_fn", "with run.load(like=...): ", takes_extra=True)
_TRACED: Final = ("jax", "key")


def load_or_initialise(
    path: Path | None, init_fn: Callable[[], Any], options: LoadOptions, *, timeout: float | None
) -> Callable[[], tuple[Any, tuple[str, ...]]]:
    """Return what returns the tree, and the key texts of the leaves that were initialised; what is stored is read now.

    Of the leaves that are loaded no array is ever made by ``init_fn``; the others come out of one jitted call, each on
    its sharding. What ``init_fn`` returns beside arrays of jax (numpy arrays, Python values, functions) is taken as it
    is; an object that gives its state away, such as an iterator over data, gets the one that is stored.

    Args:
        path: the checkpoint; None initialises everything.
        init_fn: a function without arguments. It is traced, as ``jax.jit`` does, once or twice.
        options: where arrays go, what becomes of leaves that ``init_fn`` does not have, and whom to tell of progress.
        timeout: seconds to wait for other processes where arrays lie over several.

    Raises:
        MismatchError: stored leaves have other shapes or dtypes, or ``init_fn`` does not have them; all are named.
        UnsupportedError: ``init_fn`` is no function, or something is no sharding.
        TreeringError: as ``treering.load``.
    """
    if not callable(init_fn):
        raise UnsupportedError(f"init_fn is {kind_of(init_fn)}, but must be a function without arguments")
    fresh = _Fresh(init_fn, options.shardings, options.mesh)
    if path is None:
        return lambda: (fresh.complete(fresh.like, fresh.flat.keys), tuple(fresh.flat.keys))
    group = LoadGroup(path, timeout=timeout, is_shared=lambda: spans_processes(None, None, fresh.like))
    asked = LoadOptions(missing="leave", extra=options.extra, progress=options.progress, none_is_leaf=True)
    load = functools.partial(load_items, like=fresh.like, options=asked, group=group, wording=_WORDING)
    items = group.retry_on_overwrite(functools.partial(read_source, path, mapped=False), load)

    def finish() -> tuple[Any, tuple[str, ...]]:
        tree = fresh.complete(items.tree, items.kept)
        restore_states(dataclasses.replace(items, tree=tree))  # only now nothing can fail any more
        return tree, items.kept

    return finish


class _Fresh:
    """What ``init_fn`` makes, before it is made.

    Attributes:
        like: the tree, with a ``jax.ShapeDtypeStruct`` for each array of jax.
        flat: the same, flattened.
        shardings: key -> where the array goes, for each of those; None is the default device.
    """

    def __init__(self, init_fn: Callable[[], Any], shardings: Any, mesh: Any) -> None:
        """Trace ``init_fn``, and find out where its arrays go."""
        trees: list[Any] = []

        def arrays() -> list[jax.Array]:
            tree = init_fn()
            flat = flatten_like(tree)
            traced = [number for number, kind in enumerate(flat.kinds) if kind in _TRACED]
            if "abstract" in flat.kinds:
                key = flat.keys[flat.kinds.index("abstract")]
                raise UnsupportedError(
                    f"init_fn returns a jax.ShapeDtypeStruct at {key!r}", hint="it must create the array"
                )
            # No tracer may outlive the trace: of the tree only the containers are kept, and what jax does not trace.
            leaves = list(flat.leaves)
            for number in traced:
                leaves[number] = _HOLE
            trees.append(unflatten(tree, leaves))
            return [flat.leaves[number] for number in traced]

        avals = jax.eval_shape(arrays)
        skeleton = trees[-1]
        flat = flatten_like(skeleton)
        holes = [number for number, leaf in enumerate(flat.leaves) if leaf is _HOLE]
        keys = [flat.keys[number] for number in holes]
        plain = {key: aval_of(aval.shape, aval.dtype) for key, aval in zip(keys, avals, strict=True)}
        # Where meshes have explicit axes, ``init_fn`` itself says where an array goes.
        here = current_mesh() is not None
        own = {key: sharding_of(aval) for key, aval in zip(keys, avals, strict=True)} if here else {}
        self.shardings = resolve_shardings(shardings, mesh, plain, flat.keys, own)
        leaves = list(flat.leaves)
        for number, key in zip(holes, keys, strict=True):
            leaves[number] = aval_of(plain[key].shape, plain[key].dtype, self.shardings[key])
        self.like = unflatten(skeleton, leaves)
        self.flat = flatten_like(self.like)
        self._init_fn = init_fn

    def complete(self, tree: Any, missing: Sequence[str]) -> Any:
        """Return the tree with the arrays made that are missing."""
        absent = set(missing)
        leaves = flatten_like(tree).leaves
        groups: dict[Hashable, list[int]] = {}
        for number, key in enumerate(self.flat.keys):
            if key in absent and key in self.shardings:
                groups.setdefault(_devices(self.shardings[key]), []).append(number)
        for numbers in groups.values():
            for number, array in zip(numbers, self._make(numbers), strict=True):
                leaves[number] = array
        return unflatten(self.like, leaves)

    def _make(self, numbers: Sequence[int]) -> list[jax.Array]:
        """Return arrays that ``init_fn`` makes; what no array needs is not computed."""

        def arrays() -> list[jax.Array]:
            flat = flatten_like(self._init_fn())
            if flat.keys != self.flat.keys:
                raise MismatchError(
                    "init_fn returns another tree each time", hint="it must return the same keys each time"
                )
            return [flat.leaves[number] for number in numbers]

        places = [self.shardings[self.flat.keys[number]] for number in numbers]
        return cast("list[jax.Array]", jax.jit(arrays, out_shardings=places)())


_HOLE: Final = aval_of((), bool)


def _devices(sharding: Sharding | None) -> Hashable:
    """Return on which devices an array goes: one jitted call makes arrays for the same devices in the same order."""
    if isinstance(sharding, NamedSharding):
        return tuple(sharding.mesh.devices.flat)
    return None if sharding is None else frozenset(sharding.device_set)
