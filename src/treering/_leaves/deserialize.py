"""A leaves directory -> the tree of one of its branches, each array where it is wanted."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar, overload

from treering._checkpoint.joint_load import LoadGroup, spans_processes
from treering._checkpoint.load import LoadOptions, load_parts, plan_load, select_part
from treering._checkpoint.save_options import require_one_of
from treering._format.structure import as_dicts
from treering._leaves.shardings import LeafPlacer, to_dotted
from treering._leaves.source import LeavesSource, open_source
from treering._printable import kind_of
from treering._store.resolve import leaves_path
from treering._tree.likeness import Wording
from treering._tree.placement import RulesReport, Shardings
from treering.errors import UnsupportedError

if TYPE_CHECKING:
    import jax

T = TypeVar("T")


@overload
def tree_deserialize_leaves(
    checkpoint_dir: str | os.PathLike[str], mesh: jax.sharding.Mesh | None = ..., manager: Any = ..., *,
    prefix: str | None = ..., partition_rules: Any = ..., shardings: Shardings = ..., callback: Callback | None = ...,
    chunk_size: int | None = ..., target: None = ..., structure: Literal["dicts", "exact"] = ...,
    x64: Literal["error", "numpy"] = ..., timeout: float | None = ...,
    report: Callable[[RulesReport], object] | None = ...,
) -> Any: ...  # fmt: skip


@overload
def tree_deserialize_leaves(
    checkpoint_dir: str | os.PathLike[str], mesh: jax.sharding.Mesh | None = ..., manager: Any = ..., *,
    prefix: str | None = ..., partition_rules: Any = ..., shardings: Shardings = ..., callback: Callback | None = ...,
    chunk_size: int | None = ..., target: T, structure: Literal["dicts", "exact"] = ...,
    x64: Literal["error", "numpy"] = ..., timeout: float | None = ...,
    report: Callable[[RulesReport], object] | None = ...,
) -> T: ...  # fmt: skip


def tree_deserialize_leaves(
    checkpoint_dir: str | os.PathLike[str], mesh: jax.sharding.Mesh | None = None, manager: Any = None, *,
    prefix: str | None = None,
    partition_rules: Any = None, shardings: Shardings = None, callback: Callback | None = None,
    chunk_size: int | None = None, target: Any = None, structure: Literal["dicts", "exact"] = "dicts",
    x64: Literal["error", "numpy"] = "error", timeout: float | None = None,
    report: Callable[[RulesReport], object] | None = None,
) -> Any:  # fmt: skip
    """Load the tree that `tree_serialize_leaves` of treering or eformer saved; every byte is checked on the way.

    The result is eformer's: nested dicts with text keys for all containers. Leaves of every kind come back, what
    was numpy as numpy unless a sharding or rule is given for it. All arrays of another program's tree are jax arrays,
    and it has no checksums. If a save replaces the tree meanwhile, the newer one is loaded.

    Args:
        checkpoint_dir: the directory.
        mesh: of one axis: replicates what nothing else is said of; of several: each array needs a rule or sharding.
        manager: is waited for, so that what it writes can be read.
        prefix: which tree; None and "" for the one without prefix.
        partition_rules: pairs of a pattern, searched in keys with ``/`` and without prefix, and a ``PartitionSpec``.
            They win over ``shardings``; what has no axes is replicated.
        report: called with a ``treering.sharding.RulesReport`` on ``partition_rules``, instead of the warning.
        shardings: a ``Sharding``, ``PartitionSpec`` or device for all arrays, a function of (dotted key,
            ``jax.ShapeDtypeStruct``) that returns one, or a tree of these: nested, or flat with dotted keys.
        callback: ``callback(array, dotted key)`` is called for each array, in order; its result is the leaf.
        chunk_size: arrays read at a time; only what ``callback`` keeps of a batch stays there. None, 0 or less: all.
        target: a tree of the structure, shapes, dtypes and, where nothing else is said, shardings that are wanted.
        structure: "dicts", or "exact" for the containers that were saved; ``target`` wins over it.
        x64: "error" or "numpy" for 64-bit jax arrays where jax_enable_x64 is off.
        timeout: seconds to wait for other processes where arrays lie over several; else ``TREERING_TIMEOUT_S``, or 600.

    Raises:
        MismatchError: no such prefix, no rule or sharding for an array, or ``target`` differs; all of it is named.
        UnsupportedError: arrays that jax cannot hold, or an argument that makes no sense; also a ``TypeError``.
        CorruptError, FormatError, BusyError: bytes are not those that were saved; another format; a save came after
            ``callback``.
        NotFoundError, NotSharedError, TimedOutError, ProcessFailedError: no directory; others see another, are late...

    Source: eformer.serialization.tree_deserialize_leaves.

    Example:
        >>> import tempfile
        >>> from treering.leaves import tree_serialize_leaves
        >>> path = tempfile.mkdtemp()
        >>> tree_serialize_leaves(path, {"layers": [2.5, None], "step": 7})
        >>> tree_deserialize_leaves(path)
        {'layers': {'0': 2.5, '1': None}, 'step': 7}
    """
    path, batch = leaves_path(checkpoint_dir), _batch(chunk_size)
    is_shared = functools.partial(spans_processes, shardings, mesh, target)
    group = LoadGroup(path, timeout=timeout, is_shared=is_shared, repeats=callback is None)
    placer = LeafPlacer(mesh=mesh, partition_rules=partition_rules, shardings=shardings, report=report, x64=x64)
    _check_options(manager, callback, structure, x64)
    if manager is not None:
        manager.wait_until_finished()
    load = functools.partial(
        _load_branch, group=group, placer=placer, callback=callback, batch=batch, target=target, structure=structure
    )
    return group.retry_on_overwrite(functools.partial(_opened, path, prefix or None), load)


def _check_options(manager: Any, callback: Any, structure: str, x64: str) -> None:
    """Refuse arguments that make no sense, before anything is opened."""
    if manager is not None and not callable(getattr(manager, "wait_until_finished", None)):
        raise UnsupportedError(f"manager is {kind_of(manager)}, which has no method wait_until_finished()")
    if callback is not None and not callable(callback):
        raise UnsupportedError(f"callback is {kind_of(callback)}, not a function of (array, key)")
    require_one_of("structure", structure, ("dicts", "exact"))
    require_one_of("x64", x64, ("error", "numpy"))


def _batch(chunk_size: Any) -> int:
    """Return how many arrays make a batch, 0 for all."""
    try:
        return 0 if chunk_size is None else max(operator.index(chunk_size), 0)
    except TypeError as error:
        raise UnsupportedError(f"chunk_size={chunk_size!r:.100} is not a whole number of arrays") from error


@contextlib.contextmanager
def _opened(path: Path, prefix: str | None) -> Iterator[LeavesSource]:
    with contextlib.ExitStack() as files:
        yield open_source(path, files, prefix=prefix)


Callback: TypeAlias = Callable[[Any, str], Any]
"""Called as ``callback(array, dotted key)``; what it returns is the leaf."""

_WORDING: Final = Wording("target", "treering.load reads the directory too, and has more options: ")


def _load_branch(
    source: LeavesSource,
    *,
    group: LoadGroup,
    placer: LeafPlacer,
    callback: Callback | None,
    batch: int,
    target: Any,
    structure: Literal["dicts", "exact"],
) -> Any:
    """Return the tree of an opened branch, in the containers of ``target`` or in those that ``structure`` says."""
    options = LoadOptions(placer=placer)
    part = select_part(source, options)
    if structure == "dicts" and target is None:
        part = dataclasses.replace(part, structure=as_dicts(part.structure))
    plan = plan_load(source, part, target, options, wording=_WORDING)
    called = None if callback is None else lambda leaf, key: callback(leaf, to_dotted(key))
    (tree,) = load_parts(source, [plan], None, group, callback=called, batch=batch)
    return tree
