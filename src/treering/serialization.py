"""State dicts and msgpack: ``flax.serialization`` and eformer's helpers, same names and same bytes.

Change ``from flax import serialization`` to ``from treering import serialization``. Each reads the files of the other.
``docs/guides/coming-from-flax.md`` lists the differences; ``docs/spec/msgpack.md`` specifies the bytes.
"""

from __future__ import annotations

import os
from typing import Any, BinaryIO, TypeVar, overload

from treering._arrays.host import encode_state
from treering._codec.compression import default_limit, gzip_compress, gzip_decompress
from treering._foreign import state_bytes
from treering._foreign.state_bytes import pack, restore_into, unpack, unserializable
from treering._store.pieces import Readable
from treering._tree.placement import Shardings
from treering._tree.registry import has_shape_and_dtype, is_serializable, register_serialization_state
from treering._tree.state_dict import current_path, from_state_dict, leaves_of, structure_text, to_state_dict
from treering._values.arguments import view_of
from treering.tree import tree_bytes, tree_size

__all__ = [
    "MAX_CHUNK_SIZE", "compress_bytes", "current_path", "decompress_bytes", "from_bytes", "from_compressed_bytes",
    "from_state_dict", "get_serialization_info", "is_serializable", "load_from_file", "msgpack_restore",
    "msgpack_serialize", "register_serialization_state", "save_to_file", "to_bytes", "to_compressed_bytes",
    "to_state_dict", "validate_serializable",
]  # fmt: skip

MAX_CHUNK_SIZE: int = 2**30
"""Arrays of more bytes than this are written in pieces of at most this size; read at each call."""

_ORDER = "the target comes first, and its bytes second"
T = TypeVar("T")
PathOrFile = str | os.PathLike[str] | BinaryIO


def msgpack_serialize(pytree: Any, in_place: bool = False) -> bytes:
    r"""Return the msgpack form of dicts and lists around array and Python leaves.

    Lists stay lists and keys keep their types, unlike ``to_bytes``, which is for any pytree.

    Args:
        pytree: dicts, lists and leaves.
        in_place: True keeps every dict's order, False sorts keys as jax does. ``pytree`` is never changed.

    Raises:
        UnsupportedError: a leaf that could not be read back, with its path.

    Source: flax.serialization.msgpack_serialize.

    Example:
        >>> msgpack_serialize({"b": [1, None], "a": 2})
        b'\x82\xa1a\x02\xa1b\x92\x01\xc0'
    """
    return pack(pytree, chunk_size=MAX_CHUNK_SIZE, sort_keys=not in_place)


def msgpack_restore(encoded_pytree: Readable) -> Any:
    r"""Return the tree in msgpack bytes; arrays are read-only numpy views of them.

    An array that was written in chunks (``MAX_CHUNK_SIZE``) is joined in fresh memory.
    Lengths, shapes, dtype names, depth and counts are checked before memory is allocated.

    Args:
        encoded_pytree: bytes or a read-only buffer, used in place; a writable buffer is copied first.

    Raises:
        CorruptError: truncated, trailing bytes, contradicting lengths, duplicate keys, absurd nesting.
        FormatError: an unknown dtype or ext code, or gzip.

    Source: flax.serialization.msgpack_restore.

    Example:
        >>> msgpack_restore(b"\x82\xa1a\x02\xa1b\x92\x01\xc0")
        {'a': 2, 'b': [1, None]}
    """
    return unpack(view_of("encoded_pytree", encoded_pytree))


def to_bytes(target: Any) -> bytes:
    """Return the msgpack form of ``target``'s state dict, byte for byte as flax writes it.

    Args:
        target: any pytree. Arrays of every numpy and ml_dtypes dtype; big-endian ones are converted.

    Raises:
        UnsupportedError: a leaf that could not be read back, with its path.

    Source: flax.serialization.to_bytes.

    Example:
        >>> import numpy as np
        >>> to_bytes({"w": np.array([1.0], np.float32)}).hex()
        '81a177c71101939101a7666c6f61743332c4040000803f'
    """
    return pack(to_state_dict(target), chunk_size=MAX_CHUNK_SIZE, sort_keys=False)


@overload
def from_bytes(
    target: None, encoded_bytes: Readable, *, strict: bool = ..., to_jax: bool = ..., shardings: Shardings = ...,
) -> Any: ...  # fmt: skip


@overload
def from_bytes(
    target: T, encoded_bytes: Readable, *, strict: bool = ..., to_jax: bool = ..., shardings: Shardings = ...,
) -> T: ...  # fmt: skip


def from_bytes(
    target: Any, encoded_bytes: Readable, *, strict: bool = False, to_jax: bool = False, shardings: Shardings = None
) -> Any:
    """Return ``target``'s structure with the leaves in ``encoded_bytes``.

    Args:
        target: a pytree that gives the structure; None for the bare state dict.
        encoded_bytes: the result of ``to_bytes`` of treering or flax. Arrays are read-only views of it.
        strict: also compare shapes, dtypes and unexpected keys with the target, and report every difference at once.
        to_jax: put every array on the default device.
        shardings: a Sharding, or a prefix tree of Shardings, for the arrays.

    Raises:
        CorruptError, FormatError: the bytes; see ``msgpack_restore``.
        MismatchError: the structure (or, with ``strict``, shapes and dtypes) does not fit ``target``.
        UnsupportedError: an array that jax cannot hold without a cast.

    Source: flax.serialization.from_bytes.

    Example:
        >>> import numpy as np
        >>> data = to_bytes({"w": np.arange(3)})
        >>> from_bytes({"w": None}, data)
        {'w': array([0, 1, 2])}
        >>> from_bytes({"w": np.zeros(2)}, data, strict=True)
        Traceback (most recent call last):
            ...
        treering.errors.MismatchError: 1 difference between the target and the data:
          w: wanted float64[2], found int64[3]
    """
    state = unpack(view_of("encoded_bytes", encoded_bytes, _ORDER))
    return restore_into(target, state, strict=strict, to_jax=to_jax, shardings=shardings)


def save_to_file(target: Any, filepath: PathOrFile) -> None:
    """Save ``target`` as a msgpack file: when this returns, it survives a power cut.

    The file is written under another name, flushed to the disk and renamed, so that an interrupted save leaves the old
    file whole. The bytes are never built in memory. Missing parent folders are created. In a bucket some headers get
    longer forms, which every reader decodes to the same tree; ``docs/guides/buckets.md`` says why.

    Args:
        target: any pytree.
        filepath: a path, or an open binary file (written from its position; not atomic).

    Raises:
        UnsupportedError: a leaf that could not be read back; nothing was written.
        StoreError: the disk refused; the old file is intact.

    Source: eformer.pytree.save_to_file.

    Example:
        >>> save_to_file({"step": 3}, "state.msgpack")
        >>> load_from_file({"step": 0}, "state.msgpack")
        {'step': 3}
    """
    state_bytes.save(encode_state(to_state_dict(target), chunk_size=MAX_CHUNK_SIZE), filepath)


@overload
def load_from_file(
    target: None, filepath: PathOrFile, *, strict: bool = ..., to_jax: bool = ..., shardings: Shardings = ...,
    mapped: bool = ...,
) -> Any: ...  # fmt: skip


@overload
def load_from_file(
    target: T, filepath: PathOrFile, *, strict: bool = ..., to_jax: bool = ..., shardings: Shardings = ...,
    mapped: bool = ...,
) -> T: ...  # fmt: skip


def load_from_file(
    target: Any, filepath: PathOrFile, *, strict: bool = False, to_jax: bool = False, shardings: Shardings = None,
    mapped: bool = False,
) -> Any:  # fmt: skip
    """Load a msgpack file into ``target``'s structure.

    Args:
        target: a pytree that gives the structure; None for the bare state dict.
        filepath: a path, or an open binary file.
        strict: as in ``from_bytes``; checked before any array is read.
        to_jax: put every array on the default device; on CPU without a copy.
        shardings: a Sharding, or a prefix tree of Shardings, for the arrays.
        mapped: map the file instead of reading it: ready at once at any size, and read when touched. If another
            program truncates the file while it is mapped, touching it kills the process (SIGBUS); replacing it by
            rename, as ``save_to_file`` does, is safe.

    Raises:
        NotFoundError: no such file.
        StoreError: the system refused to read it.
        CorruptError, FormatError, MismatchError, UnsupportedError: as in ``from_bytes``.

    Source: eformer.pytree.load_from_file.

    Example:
        >>> save_to_file({"step": 3}, "state.msgpack")
        >>> load_from_file(None, "state.msgpack", mapped=True)
        {'step': 3}
    """
    return state_bytes.load(target, filepath, strict=strict, to_jax=to_jax, shardings=shardings, mapped=mapped)


def compress_bytes(data: Readable) -> bytes:
    """Return ``data`` in gzip form, level 6, the same for the same input.

    Source: eformer.pytree.compress_bytes; RFC 1952.

    Example:
        >>> decompress_bytes(compress_bytes(b"abc"))
        b'abc'
    """
    return gzip_compress(view_of("data", data))


def decompress_bytes(data: Readable, *, max_bytes: int | None = None) -> bytes:
    """Return the content of gzip ``data``.

    Args:
        data: one or more gzip members.
        max_bytes: refuse to decompress to more; by default 32 MiB plus 50 times the size of ``data``.

    Raises:
        CorruptError: damaged (also ``gzip.BadGzipFile``), truncated (also ``EOFError``), or above ``max_bytes``.

    Source: eformer.pytree.decompress_bytes; RFC 1952.

    Example:
        >>> import treering.errors
        >>> try:
        ...     decompress_bytes(b"no gzip")
        ... except treering.errors.CorruptError as error:
        ...     print(error)
        the gzip data is damaged: ...
    """
    return gzip_decompress(view_of("data", data), max_bytes)


def to_compressed_bytes(target: Any) -> bytes:
    """Return ``to_bytes(target)`` in gzip form.

    Source: eformer.pytree.to_compressed_bytes.

    Example:
        >>> from_compressed_bytes({"a": 0}, to_compressed_bytes({"a": 1}))
        {'a': 1}
    """
    return compress_bytes(to_bytes(target))


@overload
def from_compressed_bytes(
    target: None, compressed_data: Readable, *, strict: bool = ..., to_jax: bool = ..., shardings: Shardings = ...,
    max_bytes: int | None = ...,
) -> Any: ...  # fmt: skip


@overload
def from_compressed_bytes(
    target: T, compressed_data: Readable, *, strict: bool = ..., to_jax: bool = ..., shardings: Shardings = ...,
    max_bytes: int | None = ...,
) -> T: ...  # fmt: skip


def from_compressed_bytes(
    target: Any, compressed_data: Readable, *, strict: bool = False, to_jax: bool = False, shardings: Shardings = None,
    max_bytes: int | None = None,
) -> Any:  # fmt: skip
    """Return ``from_bytes`` of the content of gzip ``compressed_data``.

    Args and errors are those of ``from_bytes`` and ``decompress_bytes``.

    Source: eformer.pytree.from_compressed_bytes.

    Example:
        >>> from_compressed_bytes(None, to_compressed_bytes([1, 2]))
        {'0': 1, '1': 2}
    """
    packed = view_of("compressed_data", compressed_data, _ORDER)
    data = decompress_bytes(packed, max_bytes=max_bytes)
    # Hostile containers are held to what came in, and not to what it unpacked to.
    allowance = default_limit(packed.nbytes) if max_bytes is None else None
    state = unpack(data, allowance=allowance)
    return restore_into(target, state, strict=strict, to_jax=to_jax, shardings=shardings)


def validate_serializable(pytree: Any) -> tuple[bool, list[str]]:
    """Return whether ``to_bytes(pytree)`` would work, and a line for each leaf that prevents it.

    Source: eformer.pytree.validate_serializable.

    Example:
        >>> validate_serializable({"a": 1})
        (True, [])
        >>> ok, issues = validate_serializable({"a": {1, 2}, "b": 2**70})
        >>> ok, len(issues)
        (False, 2)
    """
    issues = unserializable(pytree, chunk_size=MAX_CHUNK_SIZE)
    return not issues, issues


def get_serialization_info(pytree: Any) -> dict[str, Any]:
    """Return facts about the serialized form of ``pytree``.

    The dict holds ``num_leaves`` (None is not a leaf), ``tree_structure`` (text), ``total_elements``, ``memory_bytes``,
    ``is_serializable`` (would ``to_bytes`` work) and ``dtypes`` (sorted names).

    Source: eformer.pytree.get_serialization_info.

    Example:
        >>> import numpy as np
        >>> info = get_serialization_info({"w": np.zeros((2, 3), np.float32), "step": 1})
        >>> info["num_leaves"], info["total_elements"], info["memory_bytes"], info["dtypes"]
        (2, 7, 32, ['float32'])
    """
    leaves = list(leaves_of(pytree))
    return {
        "num_leaves": len(leaves),
        "tree_structure": structure_text(pytree),
        "total_elements": tree_size(pytree),
        "memory_bytes": tree_bytes(pytree),
        "is_serializable": validate_serializable(pytree)[0],
        "dtypes": sorted({str(leaf.dtype) for leaf in leaves if has_shape_and_dtype(leaf)}),
    }
