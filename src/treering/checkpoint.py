"""Checkpoints: save a tree, load all or a part of it, open it lazily; and the types of what these take and return.

The functions are names of ``treering`` itself.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType, MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, ParamSpec, TypeAlias, TypedDict, TypeVar, Unpack, overload

if TYPE_CHECKING:
    import jax
    from jax.typing import DTypeLike

    from treering._background.saves import PendingLoad
    from treering._background.writer import PendingSave
    from treering._checkpoint.forms import Where
    from treering._checkpoint.open import Checkpoint, LeafView
    from treering._format.index import ForeignKey, OpaqueLeaf
    from treering._format.structure import StandIn, register_node
    from treering._keymap.key_map import KeyMap
    from treering._tree.each import Each, EachStates, each
    from treering._tree.likeness import uncompared
    from treering._tree.placement import Shardings

__all__ = [
    "Checkpoint", "Each", "EachStates", "ForeignKey", "LeafView", "LoadKeywords", "OpaqueLeaf", "PendingLoad",
    "PendingSave", "Shardings", "StandIn", "abstract", "convert", "each", "export", "load", "load_async", "open",
    "register_node", "save", "save_async", "uncompared",
]  # fmt: skip

# What needs numpy or jax, imported when it is asked for.
_LATER = {
    "Checkpoint": "_checkpoint.open",
    "Each": "_tree.each",
    "EachStates": "_tree.each",
    "ForeignKey": "_format.index",
    "LeafView": "_checkpoint.open",
    "OpaqueLeaf": "_format.index",
    "PendingLoad": "_background.saves",
    "PendingSave": "_background.writer",
    "Shardings": "_tree.placement",
    "StandIn": "_format.structure",
    "each": "_tree.each",
    "register_node": "_format.structure",
    "uncompared": "_tree.likeness",
}

Dtypes: TypeAlias = "DTypeLike | Mapping[str, DTypeLike | None] | None"
P = ParamSpec("P")
T = TypeVar("T")
Progress: TypeAlias = Callable[[int, int], object]


def moved_options(
    shared: type | None = None, defaults: Mapping[str, Any] = MappingProxyType({}), /, **instead: str
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a call with an option of an earlier version raise a TypeError that says what to write instead.

    Args:
        shared: a ``TypedDict`` of the options that the function takes as ``**options``; its signature shows them, and
            others are refused.
        defaults: of those options whose default is not None.
        instead: for each old or reserved option, what to do now.

    Example:
        >>> @moved_options(rename="pass key_map=")
        ... def load(path): return path
        >>> load("a", rename={})
        Traceback (most recent call last):
            ...
        TypeError: load() has no option 'rename': pass key_map=
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = None if shared is None else _with_options(function, shared.__annotations__, defaults)

        @functools.wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> T:
            if moved := options.keys() & instead.keys():
                name = min(moved)
                raise TypeError(f"{function.__name__}() has no option {name!r}: {instead[name]}")
            if signature is not None and (unknown := options.keys() - signature.parameters.keys()):
                from treering._values.human import near

                close = near(min(unknown), signature.parameters)
                meant = f". Did you mean {close!r}?" if close else ""  # as Python says of other functions
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument {min(unknown)!r}{meant}")
            return function(*args, **options)

        if signature is not None:
            vars(call)["__signature__"] = signature
        return call

    return decorate


def _with_options(
    function: Callable[..., Any], options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> inspect.Signature:
    """Return the signature of a function with an option for each name in place of ``**options``."""
    signature = inspect.signature(function)
    named = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    named += [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(name),
            annotation=getattr(kind, "__forward_arg__", kind),  # a TypedDict wraps what is written as text
        )
        for name, kind in options.items()
    ]
    return signature.replace(parameters=named)


def later_names(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module of which some names are imported when they are asked for.

    Args:
        module: the name of the module.
        homes: the names -> the modules that have them, below ``treering``.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"treering.{homes[name]}"), name)

    return find


def moved_names(module: str, /, *names: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module that had some names of this one in an earlier version.

    Args:
        module: the full name of the module.
        names: those names.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is {__name__}.{name} now", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(__name__), name)

    return find


@moved_options(
    form="call treering.export(path, tree, to=...)",
    **dict.fromkeys(("max_file_size", "key_map"), "pass it to treering.export(path, tree, ...)"),
)
def save(
    path: str | os.PathLike[str], tree: Any, *, only: str | Sequence[str] | None = None, dtype: Dtypes = None,
    metadata: Mapping[str, Any] | None = None, overwrite: bool = False, progress: Progress | bool | None = None,
    processes: Literal["all", "this"] = "all", host_local: Literal["first", "equal"] = "first",
    timeout: float | None = None, base: str | os.PathLike[str] | None = None,
) -> None:  # fmt: skip
    """Save a pytree atomically; when this returns, it survives a power cut.

    A path that ends in ``.msgpack`` or ``.safetensors`` becomes one such file, any other a folder: array bytes in
    safetensors files, and ``treering.json``, which makes them a checkpoint and is written last.

    In a job of several processes (``jax.distributed``) all call this with the same path, which all must see, and a tree
    of the same structure; each writes a part. No process returns before everything is durable, and an error on one is
    raised on all. Single files are written by each caller alone.

    Args:
        path: the path to save to; a relative one counts from the current folder. Missing folders are created.
        tree: any pytree. Arrays of jax and numpy on any devices of the job, typed PRNG keys, Python numbers, None, str,
            bytes. Functions and other static objects are recorded by name and come back from ``like``.
        only: glob or globs over key texts, as for ``load``: save what they keep, such as an adapter, and record that it
            is a part. ``load([base, part], like)`` puts it over the rest.
        dtype: the dtype that arrays of floats are saved in, or a dict of globs and dtypes, of which the first that
            matches a leaf counts; None leaves its own. It rounds; a value that would change in another way raises.
        metadata: JSON to store beside the tree: dicts with str keys, lists, str, finite numbers, bool, None.
        overwrite: replace an existing checkpoint. Only its own files are removed, and only after the new one is
            complete; other files in the folder stay.
        progress: called as ``progress(done, total)``, in the bytes that this process writes; with ``base=`` the total
            may grow meanwhile. True shows a bar on stderr if that is a terminal, and nothing elsewhere.
        processes: "this" for a save by the calling process alone, of arrays that it holds alone.
        host_local: leaves that every process holds by itself (numpy, Python, arrays on its own devices) are taken from
            process 0, and so is ``metadata``. "equal" refuses them if they differ between processes.
        timeout: seconds to wait at one point for other processes. Default: ``TREERING_TIMEOUT_S``, else 600.
        base: the folder of an older checkpoint. What it has already is not written again: its data files are shared by
            hard links, or copied by the server of a bucket. Each checkpoint stays whole whatever becomes of the other.

    Raises:
        ExistsError: the path exists; also a ``FileExistsError``. BusyError: another process is saving to the path.
        UnsupportedError: a leaf cannot be stored; the error names all such leaves, and nothing was written.
        MismatchError: the processes have different trees, a glob matches nothing, or a value does not fit ``dtype``.
        TimedOutError, ProcessFailedError: other processes did not arrive, or failed; the error names them.
        StoreError: the system refused; an ``OSError``. ``NotSharedError``: not all processes see the same folder.

    Source: ``docs/spec/checkpoint.md``. ``docs/guides/buckets.md`` lists where a bucket cannot fence a file:
    ``NotFencedWarning``.

    Example:
        >>> import os, tempfile, jax.numpy as jnp
        >>> path = os.path.join(tempfile.mkdtemp(), "ckpt")
        >>> save(path, {"w": jnp.ones((2, 3)), "step": 7}, metadata={"loss": 0.25})
        >>> load(path)["step"]
        7
    """
    from treering._checkpoint.save import counted, save_tree
    from treering._checkpoint.save_options import SaveOptions

    with counted(path, processes):
        save_tree(tree, SaveOptions.of(
            path, only=only, dtype=dtype, metadata=metadata, overwrite=overwrite, progress=progress,
            processes=processes, host_local=host_local, timeout=timeout, base=base,
        ))  # fmt: skip


def save_async(
    path: str | os.PathLike[str], tree: Any, *, only: str | Sequence[str] | None = None, dtype: Dtypes = None,
    metadata: Mapping[str, Any] | None = None, overwrite: bool = False, progress: Progress | bool | None = None,
    processes: Literal["all", "this"] = "all", host_local: Literal["first", "equal"] = "first",
    timeout: float | None = None, base: str | os.PathLike[str] | None = None,
) -> PendingSave:  # fmt: skip
    """Save a pytree like ``save``, in the background: this returns when treering holds a snapshot of the tree.

    Then you may donate arrays and write to numpy arrays. One thread writes one save after the other. At most two are in
    flight, and they hold at most half of the machine's memory (``TREERING_ASYNC_BYTES``); a further call waits until
    there is room.

    An error is raised by ``result()`` or ``exception()`` of the result; else by the next save or load of the same path;
    else it is a line on stderr at the program's end, with status 1. A program that ends waits for its saves in flight
    as long as they make progress, unless a signal kills it.

    Args:
        path: as for ``save``.
        tree: as for ``save``; a leaf that cannot be saved is refused before this returns.
        only: as for ``save``.
        dtype: as for ``save``; the snapshot has the tree's own dtypes, and the thread that writes casts.
        metadata: as for ``save``.
        overwrite: as for ``save``.
        progress: as for ``save``, but called from, or shown by, the thread that writes.
        processes: as for ``save``. All processes of a job have to begin their joint saves in the same order.
        host_local: as for ``save``.
        timeout: as for ``save``; a call that waits for a save gives up if it shows no progress for so long.
        base: as for ``save``; it may be in flight itself.

    Raises:
        UnsupportedError: a leaf cannot be stored; the error names all such leaves.
        TimedOutError: there is no room, because the saves in flight show no progress; or other processes did not
            arrive.
        TreeringError: an earlier save to the path failed, with an error that was not raised yet; it has that class.

    Example:
        >>> import os, tempfile
        >>> import numpy as np
        >>> path, weights = os.path.join(tempfile.mkdtemp(), "ckpt"), np.zeros(3)
        >>> pending = save_async(path, {"w": weights})
        >>> weights += 1
        >>> pending.result()
        >>> load(path)["w"]
        array([0., 0., 0.])
    """
    from treering._checkpoint.save import begin_save, counted
    from treering._checkpoint.save_options import SaveOptions
    from treering._values.telemetry import phase

    with counted(path, processes), phase("save/blocked"):
        return begin_save(tree, SaveOptions.of(
            path, only=only, dtype=dtype, metadata=metadata, overwrite=overwrite, progress=progress,
            processes=processes, host_local=host_local, timeout=timeout, base=base,
        ))  # fmt: skip


class LoadKeywords(TypedDict, total=False):
    """The options that ``load`` and ``Run.load`` take; ``load`` says what each one means."""

    only: str | Sequence[str] | None
    at: str | None
    shardings: Shardings
    mesh: jax.sharding.Mesh | None
    key_map: KeyMap | Mapping[str, str] | None
    missing: Literal["error", "keep"]
    extra: Literal["error", "ignore"]
    cast: bool
    mapped: bool
    progress: Progress | bool | None
    timeout: float | None


LOAD_DEFAULTS: Final[Mapping[str, Any]] = {"missing": "error", "extra": "error", "cast": False, "mapped": False}
"""Defaults of these options; that of all others is None."""


@overload
def load(path: Where, like: EllipsisType | None = ..., **options: Unpack[LoadKeywords]) -> Any: ...


@overload
def load(path: Where, like: T, **options: Unpack[LoadKeywords]) -> T: ...


@moved_options(LoadKeywords, LOAD_DEFAULTS, rename="pass the dict as key_map=")
def load(path: Where, like: Any = None, **options: Unpack[LoadKeywords]) -> Any:
    """Load a pytree, or a part of it, onto any devices, and check every byte.

    Without ``like``, dicts, lists, tuples and namedtuples come back as they were, other containers as ``StandIn`` (see
    ``register_node``), numpy leaves as numpy, jax as jax, Python as Python; ``weak_type`` is not kept, big-endian numpy
    arrays come back little-endian, and 64-bit jax arrays are numpy if jax_enable_x64 is off. With ``like``, its
    containers are rebuilt around the stored leaves; a numpy leaf has its byte order.

    Args:
        path: a checkpoint, a leaves directory (its prefixes are branches), or a ``.safetensors`` or ``.msgpack`` file.
            Of a list, such as a base and an adapter, each lies over those before it: containers merge by key, of each
            leaf the last one counts, and all options are about the whole.
        like: the structure, shapes and dtypes wanted: arrays or ``jax.ShapeDtypeStruct``; a numpy leaf gives numpy.
            ``...`` in the place of a leaf or a branch gives what was saved there, as without ``like``.
        only: glob or globs over key texts, such as ``"params/**"``; ``*`` matches inside a part, ``**`` any parts. A
            list or tuple that loses items comes back as a dict of index to item.
        at: key text of the subtree to load as if it were the whole tree.
        shardings: a ``jax.sharding.Sharding``, ``PartitionSpec`` or device for every array; a prefix tree of them, in
            which None is the default device; a function of (key text, ``jax.ShapeDtypeStruct``) that returns one; or
            partition rules, pairs of a pattern and a ``PartitionSpec``. Default: ``like``'s, else the default device.
        mesh: the mesh of partition specs; default: that of ``jax.set_mesh``. Alone, it is that of ``like``'s specs, and
            arrays without a spec are replicated on it.
        key_map: a dict of wanted key -> stored key, for leaves or branches of ``like``; or a ``KeyMap``, to load the
            tree that it makes of the stored one: all other arguments are about that tree.
        missing: "error", or "keep" to keep what ``like`` has for leaves that are not stored.
        extra: "error", or "ignore" to leave out stored leaves that ``like`` does not have; they are not read.
        cast: convert numbers to ``like``'s dtype, within a category (float to float) or to a wider one. It rounds
            floats; a value that would change in another way raises.
        mapped: let arrays be read-only views of the files. Truncating such a file ends this process.
        progress: called as ``progress(done, total)``, in bytes; in a joint load, in those that this process reads.
            True shows a bar on a terminal, as for ``save``.
        timeout: seconds to wait for other processes in a joint load; default: ``TREERING_TIMEOUT_S``, else 600.

    Raises:
        NotFoundError: the path does not exist; also a ``FileNotFoundError``.
        UnsupportedError: an argument has no meaning, or a partition spec has no mesh.
        MismatchError: ``like``, ``only``, ``at``, ``shardings`` or ``key_map`` do not fit; it names every difference.
        CorruptError: the bytes are not those that were saved; the error names leaf, file and byte range.
        FormatError, StoreError: another tool or a newer treering wrote it; the system refused.
        TimedOutError, ProcessFailedError, NotSharedError: other processes are late, failed, or see another folder.

    Example:
        >>> import os, tempfile, jax, jax.numpy as jnp
        >>> path = os.path.join(tempfile.mkdtemp(), "ckpt")
        >>> save(path, {"params": {"w": jnp.ones((2, 3))}, "step": 7})
        >>> load(path, only="params/**")["params"]["w"].shape
        (2, 3)
        >>> load(path, {"w": jax.ShapeDtypeStruct((2, 3), "float32")}, at="params")["w"].sum()
        Array(6., dtype=float32)
    """
    from treering._checkpoint.load import LoadOptions
    from treering._runs.iterators import load_tree

    return load_tree(path, like, LoadOptions.of(options))


@overload
def load_async(path: Where, like: EllipsisType | None = ..., **options: Unpack[LoadKeywords]) -> PendingLoad[Any]: ...


@overload
def load_async(path: Where, like: T, **options: Unpack[LoadKeywords]) -> PendingLoad[T]: ...


@moved_options(LoadKeywords, LOAD_DEFAULTS)
def load_async(path: Where, like: Any = None, **options: Unpack[LoadKeywords]) -> PendingLoad[Any]:
    """Load a pytree like ``load``, in the background: this returns at once, and ``result()`` of the result is the tree.

    A thread of its own reads, checks and places the leaves, with the mesh, default device and ``jax_enable_x64`` that
    the caller has now. Arrays that lie over several processes are refused: these would have to meet.

    Args:
        path: as for ``load``.
        like: as for ``load``; it stays as it is until the load has ended.
        options: those of ``load``.

    Raises:
        UnsupportedError: an option has no meaning, or ``shardings``, ``mesh`` or ``like`` name several processes. What
            else ``load`` raises comes from ``result()`` or ``await``; where nobody asks, it is a line on stderr at the
            program's end, with status 1.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "ckpt")
        >>> save(path, {"params": {"w": 1.5}, "step": 7})
        >>> pending = load_async(path, at="params")
        >>> pending.result()
        {'w': 1.5}
    """
    from treering._checkpoint.load import LoadOptions, begin_load_tree

    return begin_load_tree(path, like, LoadOptions.of(options))


def open(path: Where, *, key_map: KeyMap | None = None) -> Checkpoint:  # noqa: A001 - treering.open is the name
    """Open a checkpoint or single file as a mapping of key texts; arrays are read when they are sliced.

    Args:
        path: as for ``load``; of several, ``origin(key)`` of the result says where a leaf comes from.
        key_map: the ``KeyMap`` that makes the tree of the stored one.

    Raises:
        NotFoundError, MismatchError, CorruptError, FormatError, StoreError: as ``load``.

    Example:
        >>> import os, tempfile
        >>> import numpy as np
        >>> path = os.path.join(tempfile.mkdtemp(), "ckpt")
        >>> save(path, {"w": np.arange(6).reshape(2, 3)}, metadata={"loss": 0.25})
        >>> with open(path) as ckpt:
        ...     ckpt["w"][1], ckpt.metadata["loss"]
        (array([3, 4, 5]), 0.25)
    """
    from treering._checkpoint.open import open_path

    return open_path(path, key_map)


def abstract(
    path: Where, *, only: str | Sequence[str] | None = None, at: str | None = None, key_map: KeyMap | None = None
) -> Any:
    """Return the tree of a checkpoint without its arrays, from headers alone: for ``like=``, ``jax.eval_shape``, sizes.

    Every array is a ``jax.ShapeDtypeStruct``. It has the sharding that the array was saved with where that is recorded
    and this job has enough devices: on a mesh of the same axes over ``jax.devices()`` in their order; else None. Typed
    PRNG keys have a key dtype. Small Python values are themselves. A long text, which lies in a data file, is an
    ``OpaqueLeaf``; in ``like`` that stands for the text which was saved.

    Args:
        path: as for ``load``; also a run, of which the latest step is taken.
        only: as for ``load``.
        at: as for ``load``.
        key_map: as for ``open``.

    Raises:
        NotFoundError, MismatchError, CorruptError, FormatError, StoreError: as ``load``.

    Example:
        >>> import os, tempfile, jax.numpy as jnp
        >>> path = os.path.join(tempfile.mkdtemp(), "ckpt")
        >>> save(path, {"params": {"w": jnp.ones((2, 3))}, "step": 7})
        >>> abstract(path)
        {'params': {'w': ShapeDtypeStruct(shape=(2, 3), dtype=float32)}, 'step': 7}
        >>> load(path, abstract(path, only="params"), only="params")["params"]["w"].shape
        (2, 3)
    """
    from treering._checkpoint.load import abstract_tree

    return abstract_tree(path, at=at, only=only, key_map=key_map)


def export(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    to: str | None = None,
    key_map: KeyMap | None = None,
    dtype: Dtypes = None,
    max_file_size: int | str | None = None,
    lose: str | Sequence[str] = (),
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Progress | bool | None = None,
) -> None:
    """Save a pytree in memory in a form of another program, as ``convert`` does for what stands at a path.

    In a job of several processes, process 0 does this alone: it has to hold all arrays, and any other process that
    calls this is refused. ``docs/guides/convert.md`` says what each form can hold.

    Args:
        path: as for ``convert``.
        tree: any pytree.
        to: as for ``convert``: "hf" writes a Hugging Face folder, ``model.safetensors`` or shards and their index,
            which transformers and PyTorch open; keys are joined by ".". "orbax" writes an item that Orbax restores,
            with a target or without one, on disk only. A folder that holds either is refused, with ``overwrite`` too.
        key_map: write the leaves of which ``load`` with this ``KeyMap`` makes the tree, so that one map serves both.
        dtype: as for ``save``.
        max_file_size: as for ``convert``.
        lose: as for ``convert``.
        metadata: as for ``save``, as far as the form holds any: a Hugging Face folder holds texts by names.
        overwrite: as for ``save``.
        progress: as for ``save``.

    Raises:
        UnsupportedError: the form cannot hold something that ``lose`` does not name; the error lists it with its kind,
            and nothing was written. Or another process holds a part of an array, or this one is not process 0.
        MismatchError: ``key_map`` does not fit, or leaves that are copies by it differ; the error names the leaves.
        ExistsError, BusyError, StoreError: as ``save``.

    Example:
        >>> import os, tempfile
        >>> import numpy as np
        >>> path = os.path.join(tempfile.mkdtemp(), "model")
        >>> export(path, {"layer": {"w": np.ones((2, 3))}}, to="hf")
        >>> sorted(os.listdir(path)), load(path)["layer.w"].shape
        (['model.safetensors'], (2, 3))
    """
    from treering._checkpoint.convert import ConvertOptions, export_tree, save_options

    into = save_options(
        path, to=to, metadata=metadata, overwrite=overwrite, progress=progress, max_file_size=max_file_size
    )
    export_tree(tree, into, ConvertOptions(to=to, key_map=key_map, dtype=dtype, lose=lose))


@moved_options(target="it is called path")
def convert(
    source: Where,
    path: str | os.PathLike[str],
    *,
    to: str | None = None,
    only: str | Sequence[str] | None = None,
    at: str | None = None,
    key_map: KeyMap | None = None,
    dtype: Dtypes = None,
    max_file_size: int | str | None = None,
    items: Mapping[str, str] | None = None,
    lose: str | Sequence[str] = (),
    overwrite: bool = False,
    progress: Progress | bool | None = None,
) -> None:
    """Save what stands at one path, of any form that ``load`` reads, to another path; the result is verified.

    Arrays go from file to file a piece at a time. A leaf that can only be read as a whole, such as a compressed one, is
    held as a whole. The calling process works alone. ``docs/guides/convert.md`` says what each form can hold.

    Of a run, and of a root of Orbax's ``CheckpointManager``, every step becomes a step of a run, with its number,
    metrics, metadata and time; with ``to="orbax"`` a step of such a root. The options apply to each. An earlier call's
    steps are not converted again. One that cannot be converted does not stop the others; the error at the end names it.

    Args:
        source: as for ``load``; also a run. Of a list the result is all of it in one; a run is none of a list.
        path: where to. One that ends in ``.safetensors``, ``.msgpack`` or ``.npz`` becomes such a file, else a folder.
        to: the form of the target: "treering" (the default), "hf", "leaves" or "orbax" for a folder; for a file its
            suffix says it; or a form that another package writes (``docs/reference/plug-points.md``).
        only: as for ``load``.
        at: as for ``load``.
        key_map: as for ``open``.
        dtype: as for ``save``; globs are about the tree that ``key_map`` makes.
        max_file_size: of the form "hf", bytes or a text; default: "5GB". A larger array has a file of its own.
        items: of the form "orbax", name of an item -> key of the subtree in it; "grain:KEY" is the state of an iterator
            of grain, "json:NAME" a member of the metadata. Default: one item "default" in a step of a run, else none.
        lose: what may be lost: kinds of losses (``docs/guides/convert.md`` lists them) and globs over keys of leaves.
        overwrite: as for ``save``.
        progress: as for ``save``.

    Raises:
        UnsupportedError: the target cannot hold something that ``lose`` does not name; the error lists it with its
            kind, and nothing was written. Or the source is a run, and the target is none.
        NotFoundError, MismatchError, CorruptError, FormatError, StoreError: as ``load``.
        ExistsError, BusyError: as ``save``; also where the target is of another run or options, or the source replaced.

    Example:
        >>> import os, tempfile, numpy as np
        >>> folder = tempfile.mkdtemp()
        >>> save(os.path.join(folder, "ckpt"), {"w": np.ones((2, 3)), "step": 7})
        >>> convert(os.path.join(folder, "ckpt"), os.path.join(folder, "w.safetensors"), only="w", dtype="float16")
        >>> load(os.path.join(folder, "w.safetensors"))["w"].dtype
        dtype('float16')
    """
    from treering._checkpoint.convert import ConvertOptions, save_options
    from treering._runs.convert_run import convert_any

    into = save_options(path, to=to, overwrite=overwrite, progress=progress, max_file_size=max_file_size)
    options = ConvertOptions(to=to, only=only, at=at, key_map=key_map, dtype=dtype, lose=lose, items=items)
    convert_any(source, into, options)


if not TYPE_CHECKING:  # a type checker sees the imports above, and so a mistyped name
    __getattr__ = later_names(__name__, _LATER)


def __dir__() -> list[str]:
    return sorted(__all__)
