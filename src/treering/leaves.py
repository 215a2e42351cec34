"""The door to leaves directories: trees as zarr v2 arrays, one folder for each leaf.

The names, arguments and files are those of ``eformer.serialization``; ``docs/coming-from-eformer.md`` says what is
other. Here nothing is lost on the way: every leaf comes back, every byte is checked, and a save is whole or not there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from treering._ops.deserialize_leaves import tree_deserialize_leaves
from treering._ops.folder_path import folder_path
from treering._ops.index_leaves import index_directory
from treering._ops.serialize_any import serialize
from treering._tree.leaf_key_paths import is_array_like, join_key, leaf_key_paths

__all__ = [
    "index_leaves",
    "is_array_like",
    "join_key",
    "leaf_key_paths",
    "tree_deserialize_leaves",
    "tree_serialize_leaves",
]

Progress: TypeAlias = Callable[[int, int], object]


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
    progress: Progress | None = None,
    processes: Literal["all", "this"] = "all",
    host_local: Literal["first", "equal"] = "first",
    timeout: float | None = None,
) -> None:
    """Save a pytree into a leaves directory, all or nothing; when this returns, it survives a power cut.

    The directory may hold any number of trees, each with a prefix of its own, and one without. A save replaces the
    tree of its prefix: its leaves go, whatever their shapes, dtypes and shardings were; other trees and other files
    stay. Until then a reader finds the old tree, whole, whatever happens.

    Arrays become zarr v2 arrays at their key paths, in chunks as they lie on devices, which any zarr reader takes.
    Everything else (None, numbers, str, bytes, empty containers, the containers' types) is in the index, with a
    checksum of every block.

    In a job of several processes (``jax.distributed``) all of them call this, with trees of the same structure, keys
    and shapes and with the same arguments. Each writes some of the chunks that its devices hold; process 0 commits when
    all have.

    Args:
        checkpoint_dir: where to; missing folders are made.
        pytree: any pytree, as for ``treering.save``. Keys become names of folders; what cannot be one is escaped.
        manager: writes the jax arrays in the background: a ``GlobalAsyncCheckpointManager`` of jax, or whatever has
            ``serialize_with_paths`` and ``wait_until_finished``. The call returns when nothing in ``pytree`` is needed
            any more, as far as the manager keeps to that, and the save is committed when the manager has written:
            ``manager.wait_until_finished()`` waits for that, and raises what went wrong.
        prefix: name of this tree; its leaves lie below it. ``.`` and ``/`` in it separate folders. None or "": none.
        commit_callback: called once, without arguments, when the tree is durable and the index says so; by the
            manager's thread where there is a manager, by process 0 of several.
        write_index: False leaves the index as it is; `index_leaves` takes the tree up later.
        compressor: configuration of a zarr v2 compressor that TensorStore knows, such as
            ``{"id": "zstd", "level": 1}``. None: raw, the fastest.
        chunk_bytes: chunks larger than this are cut along their leading axes.
        progress: called as ``progress(done, total)``, in bytes; of several processes each counts its own.
        processes: "all": the processes of the job save together. "this": this process saves alone, whatever the others
            do; it has to hold all of every array.
        host_local: leaves that each process holds by itself (numpy, Python, arrays on its own devices) are saved as
            process 0 has them. "equal": a difference between the processes is a `Mismatch`, and nothing is saved.
        timeout: seconds to wait at one point for other processes; None: what ``TREERING_TIMEOUT_S`` says, else 600.

    Raises:
        Unsupported: a leaf, key or prefix cannot be stored, the path is a URL, or an argument makes no sense.
        Mismatch: a leaf would lie in or around the folder of a leaf with another prefix; both are named. Or the
            processes have different trees, or were given different arguments.
        Exists: files that no index lists lie where leaves belong.
        Corrupt: the index that is there is damaged; `index_leaves` makes it anew.
        Busy: another process is saving there.
        Timeout: other processes of the job did not come in time; ``missing`` holds their numbers.
        ProcessFailed: another process of the job failed, with an error that is none of treering's.
        StoreFailed: the system refused; an ``OSError``.

    Source: ``docs/spec/leaves.md``; eformer.serialization.tree_serialize_leaves.

    Example:
        >>> import os, tempfile
        >>> import jax.numpy as jnp
        >>> path = os.path.join(tempfile.mkdtemp(), "ckpt")
        >>> tree_serialize_leaves(path, {"dense": {"w": jnp.ones((2, 3))}, "step": 7}, prefix="model")
        >>> sorted(os.listdir(os.path.join(path, "model", "dense", "w")))
        ['.zarray', '0.0']
    """
    serialize(
        checkpoint_dir, pytree, manager, prefix=prefix, commit_callback=commit_callback, write_index=write_index,
        compressor=compressor, chunk_bytes=chunk_bytes, progress=progress,
        processes=processes, host_local=host_local, timeout=timeout,
    )  # fmt: skip


def index_leaves(checkpoint_dir: str | os.PathLike[str]) -> None:
    """Make the index of a leaves directory whole: take up saves that were left without one; make a lost one anew.

    Trees that were saved with ``write_index=False`` become part of the index, the newest of each prefix. Where the
    index is missing or damaged, it is made from what lies there: the newest whole tree of each prefix, with its
    checksums, and zarr v2 arrays of other programs, unchecked, as a tree without prefix; not those in a zarr group or
    in another leaves directory inside. Where only the record of one tree is damaged, that one is made anew. Where there
    is nothing to do, nothing is done.

    Args:
        checkpoint_dir: the directory.

    Raises:
        NotFound: there is no such directory, or nothing in it that could be indexed.
        Corrupt: there are saves, or arrays of them, whose record is lost or damaged; they are named. Everything else
            is indexed.
        Format: the index that is there is of another format.
        Mismatch: two trees were saved into one another's folders; both leaves are named, and nothing is indexed.
        Busy: another process is saving there.
        StoreFailed: the system refused; an ``OSError``.

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
    index_directory(folder_path(checkpoint_dir))
