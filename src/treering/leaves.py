"""Leaves directories: trees as zarr v2 arrays, one folder for each leaf.

The names, arguments and files are those of ``eformer.serialization``; ``docs/guides/coming-from-eformer.md`` lists the
differences. With treering every leaf comes back, every byte is checked, and a save is atomic.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import jax
from jax.tree_util import FlattenedIndexKey

from treering._leaves.commit import index_directory
from treering._leaves.deserialize import tree_deserialize_leaves
from treering._leaves.serialize import LeavesSaveOptions, counted_leaves, serialize
from treering._store.resolve import leaves_path
from treering._tree.registry import has_shape_and_dtype
from treering._tree.state_dict import map_with_path
from treering._values.arguments import timeout_seconds
from treering._view.progress import Progress, reporter

__all__ = [
    "index_leaves", "is_array_like", "join_key", "leaf_key_paths", "tree_deserialize_leaves", "tree_serialize_leaves",
]  # fmt: skip

_QUOTES = ("''", '""')


def tree_serialize_leaves(
    checkpoint_dir: str | os.PathLike[str],
    pytree: Any,
    manager: Any = None,
    *,
    prefix: str | None = None,
    commit_callback: Callable[[], object] | None = None,
    write_index: bool = True,
    compressor: Mapping[str, Any] | None = None,
    chunk_bytes: int | None = None,
    progress: Progress | bool | None = None,
    processes: Literal["all", "this"] = "all",
    host_local: Literal["first", "equal"] = "first",
    timeout: float | None = None,
) -> None:
    """Save a pytree into a leaves directory, atomically; when this returns, it survives a power cut.

    A directory holds one tree for each prefix, and one without. A save replaces the tree of its prefix; other trees and
    files stay. Before the commit readers find the old tree, whole. Arrays become zarr v2 arrays at their key paths, in
    chunks as they lie on devices; everything else is in the index, with checksums. In a job of several processes
    (``jax.distributed``) all call this with trees of the same structure and the same arguments; each writes some of the
    chunks that its devices hold, and process 0 commits when all have voted.

    Args:
        checkpoint_dir: the directory; missing folders are created. ``docs/guides/leaves.md`` has the rules of buckets.
        pytree: any pytree, as for ``treering.save``. Keys become names of folders, escaped if necessary.
        manager: writes jax arrays in the background, on disk: jax's ``GlobalAsyncCheckpointManager`` or the like. When
            this returns, you may change ``pytree``; ``manager.wait_until_finished()`` waits and raises its error.
        prefix: name of this tree; its leaves lie below it. ``.`` and ``/`` in it separate folders. None or "": none.
        commit_callback: called once when the tree is durable, by process 0; in the manager's thread if there is one.
        write_index: False does not change the index; `index_leaves` adds the tree later.
        compressor: a zarr v2 compressor of TensorStore, such as ``{"id": "zstd", "level": 1}``. None: raw, the fastest.
        chunk_bytes: larger chunks are cut along their leading axes.
        progress: called as ``progress(done, total)``, in this process's bytes; True: a bar, as for ``treering.save``.
        processes: "this" for a save by the calling process alone, of arrays that it holds alone.
        host_local: leaves that each process holds by itself are taken from process 0; "equal" refuses differences.
        timeout: seconds to wait at one point for other processes. Default: ``TREERING_TIMEOUT_S``, else 600.

    Raises:
        UnsupportedError: a leaf, key, prefix, path or argument that is not possible.
        MismatchError: a leaf would lie in or around one of another prefix, or the processes save different trees.
        ExistsError: files that no index lists lie in the place of leaves. BusyError: another process is saving there.
        CorruptError: the index is damaged; `index_leaves` rebuilds it. StoreError: the system refused; an ``OSError``.
        TimedOutError, ProcessFailedError, NotSharedError: others did not arrive, failed, or see another folder.

    Source: ``docs/spec/leaves.md``; eformer.serialization.tree_serialize_leaves.

    Example:
        >>> import numpy, os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "ckpt")
        >>> tree_serialize_leaves(path, {"dense": {"w": numpy.ones((2, 3))}, "step": 7}, prefix="model")
        >>> sorted(os.listdir(os.path.join(path, "model", "dense", "w")))
        ['.zarray', '0.0']
    """
    with counted_leaves(checkpoint_dir, processes):
        serialize(checkpoint_dir, pytree, LeavesSaveOptions(
            prefix=prefix, write_index=write_index, compressor=compressor, chunk_bytes=chunk_bytes, manager=manager,
            commit_callback=commit_callback, progress=reporter(progress, "saving"),
            processes=processes, host_local=host_local, timeout=timeout_seconds(timeout),
        ))  # fmt: skip


def index_leaves(checkpoint_dir: str | os.PathLike[str]) -> None:
    """Complete the index of a leaves directory: add saves that were left without one, and rebuild a lost index.

    Trees that were saved with ``write_index=False`` become part of the index, the newest of each prefix. A missing or
    damaged index is rebuilt from the files: the newest whole tree of each prefix, with its checksums, and zarr v2
    arrays of other programs, unchecked, as a tree without prefix; not those in a zarr group or in another leaves
    directory inside. If only the record of one tree is damaged, only that record is rebuilt. If there is nothing to do,
    nothing is changed.

    Args:
        checkpoint_dir: the directory. In a bucket nothing is rebuilt: copy the directory to a disk for that.

    Raises:
        NotFoundError: there is no such directory, or nothing in it that could be indexed.
        CorruptError: the record of some saves, or of their arrays, is lost or damaged; the error names them.
            Everything else is indexed.
        FormatError: the existing index is of another format.
        MismatchError: two trees were saved into one another's folders; the error names both leaves, and nothing is
            indexed.
        BusyError: another process is saving there.
        StoreError: the system refused; an ``OSError``.

    Source: ``docs/spec/leaves.md``.

    Example:
        >>> import os, tempfile
        >>> import jax.numpy as jnp
        >>> path = os.path.join(tempfile.mkdtemp(), "ckpt")
        >>> tree_serialize_leaves(path, {"w": jnp.ones(3)}, write_index=False)
        >>> os.path.exists(os.path.join(path, "tensorstore_index.json"))
        False
        >>> index_leaves(path)
        >>> os.path.exists(os.path.join(path, "tensorstore_index.json"))
        True
    """
    index_directory(leaves_path(checkpoint_dir))


def join_key(prefix: str | None, k: str | None) -> str:
    """Return ``prefix`` and ``k`` with a dot between them; what is empty or None is left out.

    Source: eformer.serialization.serialization.join_key.

    Example:
        >>> join_key("model", "layers.0"), join_key(None, "w"), join_key("model", ""), join_key("", None)
        ('model.layers.0', 'w', 'model', '')
    """
    return ".".join(str(part) for part in (prefix, k) if part)


def is_array_like(x: Any) -> bool:
    """Tell whether ``x`` has a shape and a dtype: arrays, numpy scalars, ``jax.ShapeDtypeStruct``; no class has.

    Source: eformer.serialization.is_array_like.

    Example:
        >>> import numpy as np
        >>> is_array_like(np.zeros(2)), is_array_like(np.float32(1)), is_array_like(1.0), is_array_like(None)
        (True, True, False, False)
    """
    return has_shape_and_dtype(x)


def leaf_key_paths(pytree: Any, prefix: str | None = "", *, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Return ``pytree`` with the dotted path of each leaf in its place.

    The parts of a path are the keys of mappings as text, the numbers of items, and the names of fields; a node that
    gives jax no keys has ``<flat index 0>`` and so on. A bare leaf is called as the prefix is. Keys that hold dots
    are not escaped: ``{"a.b": x, "a": {"b": y}}`` has two leaves called ``a.b``.

    Args:
        pytree: any pytree; None is no leaf and stays, unless ``is_leaf`` says that it is one.
        prefix: stands before every path.
        is_leaf: says where to stop early.

    Source: eformer.serialization.leaf_key_paths.

    Example:
        >>> leaf_key_paths({"layers": [1, 2], "step": 3, "none": None}, "model")
        {'layers': ['model.layers.0', 'model.layers.1'], 'none': None, 'step': 'model.step'}
    """
    try:
        pairs, treedef = jax.tree_util.tree_flatten_with_path(pytree, is_leaf=is_leaf)
    except (TypeError, ValueError, RecursionError, SystemError):
        # Keys that jax cannot sort, or more levels than it can walk; what the tree itself raises is raised again.
        def name_leaf(path: tuple[str, ...], leaf: Any) -> str | None:
            return None if leaf is None and (is_leaf is None or not is_leaf(None)) else _join_parts(prefix, path)

        return map_with_path(name_leaf, pytree, is_leaf)
    return jax.tree_util.tree_unflatten(treedef, [_join_parts(prefix, map(_key_text, path)) for path, _ in pairs])


def _join_parts(prefix: str | None, parts: Iterable[str]) -> str:
    return join_key(prefix, ".".join(parts))


def _key_text(entry: Any) -> str:
    """Return the text of one step of a path; of a class of keys that jax does not know, its text without marks."""
    if isinstance(entry, FlattenedIndexKey):
        return f"<flat index {entry.key}>"
    for name in ("key", "idx", "name"):
        if hasattr(entry, name):
            return str(getattr(entry, name))
    text = str(entry).removeprefix(".")
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
        return text[1:-1] if len(text) > 1 and text[0] + text[-1] in _QUOTES else text
    return text
