"""A program as a user's type checker sees it. It is checked, never run."""

import signal
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, assert_type

import jax
import numpy as np

import treering
from treering import checkpoint, errors, leaves, retention, serialization, sharding, tree


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


class Batches:
    def get_state(self) -> dict[str, int]:
        return {"position": 0}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def state_of(data: treering.run.Stateful) -> Any:
    return data.get_state()


def runs(state: dict[str, Any], mesh: jax.sharding.Mesh) -> None:
    pending = treering.save_async(Path("ckpt"), state, overwrite=True, progress=lambda done, total: done == total)
    assert_type(pending, treering.checkpoint.PendingSave)
    assert_type(pending.result(timeout=1), None)
    assert_type(pending.exception(), BaseException | None)
    assert_type((pending.done(), pending.cancel(), pending.path), tuple[bool, bool, Path])
    keep = treering.KeepLast(3) | treering.KeepEvery(steps=1000) | treering.KeepEvery(interval=timedelta(hours=1))
    keep = keep | treering.KeepBest("loss", n=2, mode="max") | treering.retention.KeepSteps(1, 2)
    save_every = treering.SaveEvery(steps=1000) | treering.SaveEvery(interval=600)
    with treering.Run("runs/a", keep=keep, save_every=save_every, timeout=60) as run:
        assert_type(run, treering.Run)
        saved = run.save(1, state, metrics={"loss": 0.5}, metadata={"git": "abc"}, rollback=False, force=True)
        if saved:
            assert_type(
                (saved.step, saved.reason, saved.pending), tuple[int, str, treering.checkpoint.PendingSave | None]
            )
        run.save(jax.numpy.asarray(2), {"state": state, "data": Batches()})
        run.save_on_signal(signal.SIGTERM)
        step, tree = run.load_or_init(lambda: state, shardings=None, mesh=mesh)
        assert_type(step, int | None)
        assert_type(tree, dict[str, Any])
        run.load(like=tree, only=["params/**"], missing="keep", mapped=True)
        assert_type((run.steps(), run.latest(), run.best("loss", "max")), tuple[list[int], int | None, int | None])
        assert_type(run.metrics(1), dict[str, float])
        assert_type([verdict.reasons for verdict in run.gc(dry_run=False)], list[tuple[str, ...]])
        assert_type(run.branch(1, Path("runs/b")), treering.Run)
        assert_type(run.wait(timeout=1.5), None)
    assert_type(state_of(Batches()), Any)


class Model(NamedTuple):
    w: jax.Array
    layers: int


async def awaited(model: Model) -> None:
    assert_type(await treering.load_async("ckpt", model), Model)


def parts(model: Model) -> None:
    treering.save("adapter", model, only=["**/lora"], dtype={"**/lora": jax.numpy.bfloat16, "head": "float32"})
    treering.save_async("adapter", model, only="**/lora", dtype=np.float16)
    treering.convert(["base", Path("adapter")], "merged", dtype="bfloat16")
    treering.Run("runs/a").save(1, model, only="**/lora", dtype="bfloat16")
    with treering.open(("base", "adapter")) as opened:
        assert_type(opened.origin("w"), str)


def hugging_face_folders(model: Model) -> None:
    assert_type(treering.export("model", model, to="hf", max_file_size="2GB", dtype="bfloat16"), None)
    treering.export(Path("model"), model, to="hf", max_file_size=1 << 30, dtype=jax.numpy.bfloat16)


def what_is_loaded_has_the_type_of_what_is_asked_for(model: Model, anything: Any) -> None:
    assert_type(treering.load("ckpt", model), Model)
    assert_type(treering.load("ckpt", like=model, shardings=None, cast=True), Model)
    assert_type(treering.load("ckpt", [model], at="models"), list[Model])
    assert_type(treering.load("ckpt"), Any)
    assert_type(treering.load(["base", Path("adapter")], model), Model)
    assert_type(treering.load("ckpt", ...), Any)
    assert_type(treering.load_async("ckpt", model, cast=True), treering.checkpoint.PendingLoad[Model])
    assert_type(treering.load_async(["base", "adapter"]).result(timeout=1), Any)
    assert_type(treering.load_async("ckpt", like=model).result(), Model)
    assert_type(treering.load_async("ckpt").done(), bool)
    assert_type(treering.abstract(["base", "adapter"]), Any)
    assert_type(treering.abstract(Path("ckpt"), only=["params/**"], at="state"), Any)
    assert_type(treering.load("ckpt", anything), Any)
    assert_type(leaves.tree_deserialize_leaves("ckpt", target=model), Model)
    assert_type(leaves.tree_deserialize_leaves("ckpt", None, None, prefix="m"), Any)
    assert_type(serialization.from_bytes(model, b""), Model)
    assert_type(serialization.from_bytes(None, b""), Any)
    assert_type(serialization.load_from_file(model, "a.msgpack", strict=True), Model)
    assert_type(serialization.from_compressed_bytes(model, b"", max_bytes=1 << 30), Model)
    run = treering.Run("runs/a")
    assert_type(run.load(1, model), Model)
    assert_type(run.load(like=model, missing="keep"), Model)
    assert_type(run.load(), Any)

    def fresh() -> Model:
        return model

    resumed = run.load_or_init(fresh)
    step, loaded = resumed
    assert_type((step, loaded), tuple[int | None, Model])
    assert_type((resumed.step, resumed.tree, resumed.initialised), tuple[int | None, Model, tuple[str, ...]])
    as_pair: tuple[int | None, Model] = resumed
    assert as_pair


def items(path: str) -> None:
    with treering.open(path) as opened:
        assert_type(opened["w"], treering.checkpoint.LeafView | Any)
        view = opened["w"]
        if isinstance(view, treering.checkpoint.LeafView):
            assert_type(view.shape, tuple[int, ...])


def what_a_run_returns_has_a_public_name(path: str, rule: retention.Policy) -> None:
    run = treering.Run(path, keep=rule | treering.KeepLast(2))
    assert_type(run.keep, retention.Policy | None)
    assert_type(treering.KeepLast(1) | treering.KeepBest("loss"), retention.Policy)
    assert_type(run.save(1, {"w": 1.5}), treering.run.StepSave)
    assert_type(run.load_or_init(lambda: {"w": 1.5}), treering.run.Resumed[dict[str, float]])


def restore(path: str, shardings: checkpoint.Shardings = None) -> Any:
    return treering.load(path, shardings=shardings)


def where_arrays_go(mesh: jax.sharding.Mesh, rows: jax.sharding.PartitionSpec) -> None:
    restore("ckpt", jax.sharding.NamedSharding(mesh, rows))
    restore("ckpt", jax.devices()[0])
    restore("ckpt", [(".*kernel", rows)])
    restore("ckpt", {"w": rows, "b": None})
    restore("ckpt", lambda key, array: rows if array.ndim else None)


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
    except errors.MismatchError as error:
        assert_type(error.differences, tuple[str, ...])
    except errors.StoreError as error:
        assert_type(error.errno, int | None)
    except errors.TreeringError as error:
        assert_type(error.path, tuple[str, ...] | None)
        assert_type(error.offset, int | None)
        assert_type(error.hint, str | None)
    assert_type(treering.__version__, str)


def refused(state: dict[str, Any]) -> None:
    # An ignore that is not needed is itself an error: each of these must be refused.
    serialization.from_bytes(state, "text")  # type: ignore[call-overload]
    serialization.from_bytes(state, b"", True)  # type: ignore[call-overload]
    serialization.save_to_file("a.msgpack", 3)  # type: ignore[arg-type]
    serialization.decompress_bytes(b"", max_bytes="1 GB")  # type: ignore[arg-type]
    tree.tree_size()  # type: ignore[call-arg]
    leaves.tree_deserialize_leaves("ckpt", structure="lists")  # type: ignore[call-overload]
    treering.load("ckpt", state, shape=3)  # type: ignore[call-overload]
    treering.Run("runs/a").load("latest")  # type: ignore[call-overload]
    leaves.tree_serialize_leaves("ckpt", state, None, "model")  # type: ignore[call-arg]
    sharding.make_itsharded(state)  # type: ignore[call-arg]
    treering.Run("runs/a", keep=3)  # type: ignore[arg-type]
    treering.Run("runs/a").best("loss", "least")  # type: ignore[arg-type]
    treering.Run("runs/a").gc(True)  # type: ignore[call-arg]
