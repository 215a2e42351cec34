"""A leaves directory -> the tree of one of its branches, each array where it is wanted."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from treering._checkpoint.folder_path import folder_path
from treering._checkpoint.joint_load import GivenShardings, LoadGroup
from treering._checkpoint.retry_on_overwrite import retry_on_overwrite
from treering._leaves.shardings import Said
from treering._leaves.source import LeavesSource, opened_leaves
from treering._leaves.leaves_tree import Callback, Wanted, tree_of
from treering._leaves.shardings import Said
from treering._leaves.source import LeavesSource, opened_leaves
from treering._printable import kind_of
from treering._tree.placement import Shardings
from treering._tree.rules import RulesReport
from treering.errors import Unsupported

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
        manager: is waited for. Its ``deserialize_with_paths``, if it has that, reads what it can, after the checks.
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
        Mismatch: no such prefix, no rule or sharding for an array, or ``target`` differs; all of it is named.
        Unsupported: arrays that jax cannot hold, or an argument that makes no sense; also a ``TypeError``.
        Corrupt, Format, Busy: bytes are not those that were saved; another format; a save came after ``callback``.
        NotFound, NotShared, Timeout, ProcessFailed: no directory or index; others see another, do not come, or failed.

    Source: eformer.serialization.tree_deserialize_leaves.

    Example:
        >>> import tempfile
        >>> from treering.leaves import tree_serialize_leaves
        >>> path = tempfile.mkdtemp()
        >>> tree_serialize_leaves(path, {"layers": [2.5, None], "step": 7})
        >>> tree_deserialize_leaves(path)
        {'layers': {'0': 2.5, '1': None}, 'step': 7}
    """
    path = folder_path(checkpoint_dir)
    group = LoadGroup(path, timeout=timeout, given=GivenShardings(shardings, mesh, target), repeats=callback is None)
    wanted = _wanted(
        Said(mesh=mesh, partition_rules=partition_rules, shardings=shardings, report=report), manager,
        callback=callback, chunk_size=chunk_size, target=target, structure=structure, x64=x64, group=group,
    )  # fmt: skip
    return _deserialize(path, prefix, manager, wanted)


def _wanted(
    said: Said, manager: Any, *, callback: Any, chunk_size: Any, target: Any, structure: Any, x64: Any, group: LoadGroup
) -> Wanted:
    """Refuse arguments that make no sense, before anything is opened."""
    if manager is not None and not callable(getattr(manager, "wait_until_finished", None)):
        raise Unsupported(f"manager is {kind_of(manager)}, which has no wait_until_finished()")
    if callback is not None and not callable(callback):
        raise Unsupported(f"callback is {kind_of(callback)}, not a function of (array, key)")
    for name, given, choices in (("structure", structure, ("dicts", "exact")), ("x64", x64, ("error", "numpy"))):
        if given not in choices:
            raise Unsupported(f"{name}={given!r:.100} is neither {choices[0]!r} nor {choices[1]!r}")
    return Wanted(
        said=said,
        reader=manager if callable(getattr(manager, "deserialize_with_paths", None)) else None,
        callback=callback,
        batch=_batch(chunk_size),
        target=target,
        structure=structure,
        x64=x64,
        group=group,
    )


def _batch(chunk_size: Any) -> int | None:
    """Return how many arrays make a batch, None for all."""
    if chunk_size is None:
        return None
    try:
        count = operator.index(chunk_size)
    except TypeError as error:
        raise Unsupported(f"chunk_size={chunk_size!r:.100} is no whole number of arrays") from error
    return count if count > 0 else None


def _deserialize(path: Path, prefix: str | None, manager: Any, wanted: Wanted) -> Any:
    if manager is not None:
        manager.wait_until_finished()
    return retry_on_overwrite(
        lambda: _opened(path, prefix or None), lambda source: tree_of(source, wanted), wanted.group
    )


@contextlib.contextmanager
def _opened(path: Path, prefix: str | None) -> Iterator[LeavesSource]:
    with contextlib.ExitStack() as files:
        yield opened_leaves(path, files, prefix=prefix)
