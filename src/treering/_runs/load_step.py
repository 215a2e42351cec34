"""A step of a run -> its tree: loaded where it is stored, and where not, initialised by a function that makes it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, SupportsIndex, TypeVar, cast

import jax
from jax.sharding import NamedSharding, Sharding

from treering import errors
from treering._arrays.source import Source
from treering._background.saves import wait_for
from treering._checkpoint.forms import read_source
from treering._checkpoint.joint_load import LoadGroup, spans_processes
from treering._checkpoint.load import LoadOptions
from treering._format.run_document import find_note
from treering._printable import kind_of, show_path
from treering._runs.fallback import load_newest, root_of
from treering._runs.iterators import load_items, restore_states
from treering._runs.results import Fallback, Resumed
from treering._runs.run_state import RunState, require_step_number
from treering._runs.steps import missing_step, open_run, step_path, steps_of
from treering._store.resolve import is_linked
from treering._tree.flatten import flatten_like
from treering._tree.likeness import Wording, unflatten
from treering._tree.placement import aval_of, current_mesh, resolve_shardings, sharding_of
from treering._values.telemetry import warn_of
from treering._view.progress import showing

T = TypeVar("T")

_WORDING: Final = Wording("init_fn", "with run.load(like=...): ", takes_extra=True)
_TRACED: Final = ("jax", "key")


def load_step(
    run: RunState, step: SupportsIndex | None, like: Any, options: LoadOptions, fallback: bool | Fallback = False
) -> Any:
    """Return the tree of a step; ``Run.load`` says more."""
    options.check(like)
    if step is not None:
        if fallback is not False:
            raise errors.UnsupportedError(
                "fallback= is for the latest step, and a step is given", hint="omit one of them"
            )
        number = require_step_number(step)
        return _load(run, root_of(run, number) if run.roots[1:] else run.path, number, like, options)()

    def read(latest: int | None, root: Path) -> Callable[[], Any]:
        if latest is None:
            hint = "load_or_init starts a run if nothing was saved"
            raise errors.NotFoundError(f"the run {run.shown!r} has no step yet", hint=hint)
        return _load(run, root, latest, like, options)

    return load_newest(run, read, fallback, entire=options.entire)


def load_or_init(
    run: RunState, init_fn: Callable[[], T], options: LoadOptions, fallback: bool | Fallback = False
) -> Resumed[T]:
    """Return the latest step, with what it lacks initialised; ``Run.load_or_init`` says more."""
    options.check(())
    read = functools.partial(_load_or_init, run, init_fn, options)
    return load_newest(run, read, fallback, entire=options.entire)


# --------------------------------------------------------------------------------------------------------------- steps


def _load(run: RunState, root: Path, step: int, like: Any, options: LoadOptions) -> Callable[[], Any]:
    path = step_path(root, step)
    is_shared = functools.partial(spans_processes, options.shardings, options.mesh, like)
    is_joint = functools.partial(options.places_array_of, like)
    timeout = run.timeout if options.timeout is None else options.timeout
    group = LoadGroup(path, timeout=timeout, is_shared=is_shared, is_joint=is_joint)
    with showing(options.progress), _noting_damage(run, path):
        load = functools.partial(load_items, like=like, options=options, group=group)
        items = group.retry_on_overwrite(functools.partial(_open_step, run, step, path, options, group), load)

    def finish() -> Any:
        run.note_whole(path)
        return restore_states(items)

    return finish  # only then all of it was checked, and the other processes have theirs


@contextlib.contextmanager
def _noting_damage(run: RunState, path: Path) -> Iterator[None]:
    """Note that a step is damaged: no save shares anything with it."""
    try:
        yield
    except errors.CorruptError as error:
        run.damaged.add(path)
        shown = show_path(os.fspath(path))
        others = "`treering verify` lists all damage, and fallback=True goes back to the newest step that is whole"
        error.hint = f"the damage is in {shown!r}: use another copy of it; {others}"
        raise


@contextlib.contextmanager
def _open_step(run: RunState, step: int, path: Path, options: LoadOptions, group: LoadGroup) -> Iterator[Source]:
    """Open a step; a save of it that is in flight is waited for."""
    wait_for(path)
    run.raise_unreported()
    shared = group.share_index()
    with contextlib.ExitStack() as files:
        try:
            with open_run(path.parent) as folder:
                if step in folder.superseded_steps() or is_linked(path):  # files are there, but not the step
                    raise missing_step(run.shown, step, steps_of(path.parent))
            opened = read_source(path, mapped=options.mapped, key_map=options.whole_map, shared=shared)
            source = files.enter_context(_noting(run, step, opened))
        except errors.NotFoundError as error:
            raise missing_step(run.shown, step, steps_of(path.parent)) from error
        yield source


@contextlib.contextmanager
def _noting(run: RunState, step: int, opened: AbstractContextManager[Source]) -> Iterator[Source]:
    """Open a step, and note that it is there, for ``Run.status``."""
    with opened as source:
        yield source
        if (note := find_note(source.index.metadata)) is not None:
            run.outcomes.loaded(step, note.saved)


# --------------------------------------------------------------------------------------------------- initialising


def _load_or_init(
    run: RunState, init_fn: Callable[[], T], options: LoadOptions, step: int | None, root: Path
) -> Callable[[], Resumed[T]]:
    """Return what ends the load, with what is stored read already.

    Of the leaves that are loaded no array is ever made by ``init_fn``; the others come out of one jitted call, each on
    its sharding. What ``init_fn`` returns beside arrays of jax (numpy arrays, Python values, functions) is taken as it
    is; an object that gives its state away, such as an iterator over data, gets the one that is stored.

    Args:
        run: the run.
        init_fn: a function without arguments. It is traced, as ``jax.jit`` does, once or twice.
        options: where arrays go, what becomes of leaves that ``init_fn`` does not have, and whom to tell of progress.
        step: its step; None initialises everything.
        root: the folder that has the step.

    Raises:
        MismatchError: stored leaves have other shapes or dtypes, or ``init_fn`` does not have them; all are named.
        UnsupportedError: ``init_fn`` is no function, or something is no sharding.
        TreeringError: as ``treering.load``.
    """
    if not callable(init_fn):
        raise errors.UnsupportedError(f"init_fn is {kind_of(init_fn)}, but must be a function without arguments")
    fresh = _Fresh(init_fn, options.shardings, options.mesh)
    if step is None:
        keys = fresh.flat.keys
        return lambda: Resumed(None, fresh.complete(fresh.like, keys), tuple(keys))
    path = step_path(root, step)
    group = LoadGroup(path, timeout=run.timeout, is_shared=lambda: spans_processes(None, None, fresh.like))
    asked = LoadOptions(missing="leave", extra=options.extra, progress=options.progress, none_is_leaf=True)
    load = functools.partial(load_items, like=fresh.like, options=asked, group=group, wording=_WORDING)
    with showing(options.progress), _noting_damage(run, path):
        items = group.retry_on_overwrite(lambda: _noting(run, step, read_source(path, mapped=False)), load)

    def finish() -> Resumed[T]:
        run.note_whole(path)
        tree = fresh.complete(items.tree, items.kept)
        restore_states(dataclasses.replace(items, tree=tree))  # only now nothing can fail any more
        if items.kept:
            what = f"step {step} of {run.shown!r} does not have these leaves, which `init_fn` initialised"
            warn_of(what, items.kept, errors.LeavesInitialisedWarning)
        return Resumed(step, tree, items.kept)

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
                what = f"init_fn returns a jax.ShapeDtypeStruct at {key!r}"
                raise errors.UnsupportedError(what, hint="it must create the array")
            # No tracer may outlive the trace: of the tree only the containers are kept, and what jax does not trace.
            leaves = list(flat.leaves)
            for number in traced:
                leaves[number] = _HOLE
            trees.append(unflatten(tree, leaves))
            return [flat.leaves[number] for number in traced]

        with _noting_trace():
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
                hint = "it must return the same keys each time"
                raise errors.MismatchError("init_fn returns another tree each time", hint=hint)
            return [flat.leaves[number] for number in numbers]

        places = [self.shardings[self.flat.keys[number]] for number in numbers]
        with _noting_trace():
            return cast("list[jax.Array]", jax.jit(arrays, out_shardings=places)())


@contextlib.contextmanager
def _noting_trace() -> Iterator[None]:
    """Add to an error of jax about a value that a trace does not have what to do."""
    try:
        yield
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        error.add_note(_NO_VALUES)
        raise


_NO_VALUES: Final = (
    "treering traces the function that `load_or_init` is given and does not run it, so no array of jax has a value in "
    "it: compute such a value before the call, with numpy, or below `with jax.ensure_compile_time_eval():`"
)
_HOLE: Final = aval_of((), bool)


def _devices(sharding: Sharding | None) -> Hashable:
    """Return on which devices an array goes: one jitted call makes arrays for the same devices in the same order."""
    if isinstance(sharding, NamedSharding):
        return tuple(sharding.mesh.devices.flat)
    return None if sharding is None else frozenset(sharding.device_set)
