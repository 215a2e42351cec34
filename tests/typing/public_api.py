"""A program as a user's type checker sees it. It is checked, never run."""

from pathlib import Path
from typing import Any, BinaryIO, assert_type

import jax
import numpy as np

import treering
from treering import errors, leaves, serialization, sharding, tree


def bytes_and_back(state: dict[str, np.ndarray[Any, Any]], stream: BinaryIO) -> None:
    assert_type(serialization.to_bytes(state), bytes)
    assert_type(serialization.msgpack_serialize(state, in_place=True), bytes)
    assert_type(serialization.compress_bytes(b""), bytes)
    assert_type(serialization.decompress_bytes(b"", max_bytes=10), bytes)
    assert_type(serialization.to_compressed_bytes(state), bytes)
    assert_type(serialization.save_to_file(state, Path("a.msgpack")), None)
    serialization.save_to_file(state, "a.msgpack")
    serialization.save_to_file(state, stream)
    serialization.load_from_file(state, stream, strict=True, to_jax=True, shardings=None, mapped=False)
    serialization.from_bytes(state, memoryview(b""), strict=True)
    serialization.from_compressed_bytes(None, b"", max_bytes=1 << 30)


def questions(state: dict[str, Any]) -> None:
    assert_type(serialization.validate_serializable(state), tuple[bool, list[str]])
    assert_type(serialization.get_serialization_info(state), dict[str, Any])
    assert_type(serialization.is_serializable(state), bool)
    assert_type(serialization.current_path(), str)
    assert_type(serialization.MAX_CHUNK_SIZE, int)
    assert_type(tree.tree_size(state), int)
    assert_type(tree.tree_bytes(state), int)
    tree.tree_map_with_path(lambda path, leaf: (assert_type(path, tuple[str, ...]), leaf), state)


def leaves_directories(state: dict[str, Any], mesh: jax.sharding.Mesh) -> None:
    leaves.tree_serialize_leaves("ckpt", state)
    leaves.tree_serialize_leaves(
        Path("ckpt"), state, None, prefix="model", commit_callback=lambda: None, write_index=False,
        compressor={"id": "zstd", "level": 1}, chunk_bytes=1 << 20, progress=lambda done, total: done == total,
    )  # fmt: skip
    leaves.tree_deserialize_leaves("ckpt", mesh, None, prefix="model", callback=lambda array, key: array, chunk_size=8)
    leaves.tree_deserialize_leaves("ckpt", target=state, structure="exact", x64="numpy")
    leaves.index_leaves("ckpt")
    leaves.leaf_key_paths(state, "model", is_leaf=lambda x: x is None)
    assert_type(leaves.is_array_like(state), bool)
    assert_type(leaves.join_key(None, "w"), str)
    places = sharding.create_sharding_tree_from_index("ckpt", mesh, "model", lambda info: info["path"])
    sharding.apply_sharding_tree(state, places, mesh)
    sharding.make_itsharded(state, mesh)
    assert_type(sharding.validate_sharding_tree(places, state), bool)


def registration() -> None:
    class Counter:
        count: int = 0

    def state_of(counter: Counter) -> dict[str, int]:
        return {"count": counter.count}

    def counter_from(counter: Counter, state: dict[str, Any]) -> Counter:
        counter.count = state["count"]
        return counter

    serialization.register_serialization_state(Counter, state_of, counter_from, override=True)


def failures(data: bytes) -> None:
    try:
        serialization.msgpack_restore(data)
    except errors.Mismatch as error:
        assert_type(error.differences, tuple[str, ...])
    except errors.StoreFailed as error:
        assert_type(error.errno, int | None)
    except errors.TreeringError as error:
        assert_type(error.path, tuple[str, ...] | None)
        assert_type(error.offset, int | None)
        assert_type(error.hint, str | None)
    assert_type(treering.__version__, str)


def refused(state: dict[str, Any]) -> None:
    # An ignore that is not needed is itself an error: each of these must be refused.
    serialization.from_bytes(state, "text")  # type: ignore[arg-type]
    serialization.from_bytes(state, b"", True)  # type: ignore[call-arg]
    serialization.save_to_file("a.msgpack", 3)  # type: ignore[arg-type]
    serialization.decompress_bytes(b"", max_bytes="1 GB")  # type: ignore[arg-type]
    tree.tree_size()  # type: ignore[call-arg]
    leaves.tree_deserialize_leaves("ckpt", structure="lists")  # type: ignore[arg-type]
    leaves.tree_serialize_leaves("ckpt", state, None, "model")  # type: ignore[call-arg]
    sharding.make_itsharded(state)  # type: ignore[call-arg]
