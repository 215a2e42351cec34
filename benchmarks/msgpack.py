"""treering.serialization against flax.serialization and safetensors, and against memcpy, write and read.

The reference file of each workload is written by flax, so what treering reads here is flax's own output,
and what treering writes must be the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import numpy as np
import safetensors
import safetensors.flax
import safetensors.numpy

from benchmarks import workloads
from benchmarks.files import Files, fsync, read_into, write
from benchmarks.measure import Case, Group, Work, copy_bytes, equal_bytes
from benchmarks.suite import Benchmark, Goal, Scene
from benchmarks.workloads import LeafKind, Tree
from treering import serialization as ours

__all__ = ["BENCHMARK"]

_SPARSE_LEAVES = 16
_SPARSE_LEAF = 1 << 30
_MIB = 1 << 20


def _leaf(tree: Tree, key: str) -> Any:
    """The leaf at a key with slashes."""
    node: Any = tree
    for part in key.split("/"):
        node = node[part]
    return node


class _MsgpackScene(Scene):
    """One workload with one kind of leaves, and its reference files."""

    def __init__(self, name: str, leaves: LeafKind, factor: float, folder: Path) -> None:
        self._work = workloads.build(name, factor)
        self._leaves = leaves
        self._tree = self._work.tree
        self._target = self._fresh()
        self._flat: dict[str, Any] = dict(workloads.flat(self._tree))
        self._packed = folder / f"{name}.msgpack"
        self._tensors = folder / f"{name}.safetensors"
        self._files = Files(folder / "written")
        self.title = self._work.title
        self.nbytes = self._work.nbytes
        self.repeats = self._work.repeats

    def prepare(self) -> None:
        """Write the reference files, by flax and by safetensors."""
        self._packed.parent.mkdir(parents=True, exist_ok=True)
        self._packed.write_bytes(flax.serialization.to_bytes(self._tree))
        safetensors.numpy.save_file(self._flat, self._tensors)

    def close(self) -> None:
        """Remove every file."""
        self._files.clear()
        self._packed.unlink(missing_ok=True)
        self._tensors.unlink(missing_ok=True)

    def groups(self) -> tuple[Group, ...]:
        """to_bytes, from_bytes, the file forms, and the first leaf of a mapped file."""
        # What the hungriest case takes: flax three times the tree to write jax leaves, twice to read a file.
        three, two = 3 * self.nbytes, 9 * self.nbytes // 4
        return (
            Group(name="to_bytes", cases=self._to_bytes(), room=three),
            Group(name="from_bytes", cases=self._from_bytes(), room=two),
            Group(name="save_to_file", cases=self._save(), room=three, between=self._files.clear),
            Group(name="load_from_file", cases=self._load(), room=two),
            Group(name="load_from_file to_jax", cases=self._load_to_jax(), room=two),
            Group(name="load_from_file mapped, first leaf", cases=self._first_leaf(), room=self.nbytes),
        )

    # Inputs. Whatever a case needs is made in its begin function: outside the clock and outside the peak.

    @cached_property
    def _bytes(self) -> bytes:
        """The reference bytes."""
        return self._packed.read_bytes()

    @cached_property
    def _room(self) -> np.ndarray[Any, Any]:
        """Memory for all the bytes, every page of it touched."""
        return np.ones(self._packed.stat().st_size + (1 << 20), np.uint8)

    def _fresh(self) -> Tree:
        """The input tree; jax leaves are new ones, because a jax array remembers its numpy form."""
        return self._tree if self._leaves == "numpy" else workloads.to_jax(self._tree)

    def _cached(self, path: Path) -> Path:
        """The path, once all of its pages are in the page cache."""
        read_into(path, self._room)
        return path

    # Checks.

    def _same_bytes(self, result: Any) -> str | None:
        return None if equal_bytes(result, self._bytes) else "the bytes are not those that flax writes"

    def _same_file(self, path: Path) -> str | None:
        return self._same_bytes(np.memmap(path, np.uint8, "r"))

    def _numpy_leaves(self, found: dict[str, Any]) -> str | None:
        return workloads.same_leaves(found, self._flat, np.ndarray)

    def _jax_leaves(self, found: dict[str, Any]) -> str | None:
        return workloads.same_leaves(found, self._flat, jax.Array)

    def _numpy_tree(self, tree: Tree) -> str | None:
        return self._numpy_leaves(dict(workloads.flat(tree)))

    def _jax_tree(self, tree: Tree) -> str | None:
        return self._jax_leaves(dict(workloads.flat(tree)))

    def _same_tensors(self, result: Any) -> str | None:
        before = np.memmap(self._tensors, np.uint8, "r")
        return None if equal_bytes(result, before) else "the bytes are not those that safetensors wrote before"

    def _same_tensors_file(self, path: Path) -> str | None:
        return self._same_tensors(np.memmap(path, np.uint8, "r"))

    def _room_filled(self, _: Any) -> str | None:
        return self._same_bytes(self._room[: len(self._bytes)])

    # Groups.

    def _to_bytes(self) -> tuple[Case, ...]:
        def treering() -> Work:
            tree = self._fresh()
            return lambda: ours.to_bytes(tree)

        def peer() -> Work:
            tree = self._fresh()
            return lambda: flax.serialization.to_bytes(tree)

        def tensors() -> Work:
            leaves = dict(workloads.flat(self._fresh()))
            if self._leaves == "jax":
                return lambda: safetensors.flax.save(leaves)
            return lambda: safetensors.numpy.save(leaves)

        def memcpy() -> Work:
            source, room = np.frombuffer(self._bytes, np.uint8), self._room
            return lambda: copy_bytes(room, source)

        return (
            Case(name="treering", begin=treering, check=self._same_bytes),
            Case(name="flax", begin=peer, check=self._same_bytes),
            Case(name="safetensors", begin=tensors, check=self._same_tensors),
            Case(name="memcpy", begin=memcpy, check=self._room_filled, limit=True),
        )

    def _from_bytes(self) -> tuple[Case, ...]:
        def treering() -> Work:
            data, target = self._bytes, self._target
            return lambda: ours.from_bytes(target, data)

        def peer() -> Work:
            data, target = self._bytes, self._target
            return lambda: flax.serialization.from_bytes(target, data)

        def tensors() -> Work:
            data = self._tensors.read_bytes()
            return lambda: safetensors.numpy.load(data)

        cases = [
            Case(name="treering", begin=treering, check=self._numpy_tree),
            Case(name="flax", begin=peer, check=self._numpy_tree),
        ]
        if self._numpy_tensors:
            cases.append(Case(name="safetensors", begin=tensors, check=self._numpy_leaves))
        return tuple(cases)

    @property
    def _numpy_tensors(self) -> bool:
        """Whether safetensors.numpy can read this tree: it writes bfloat16, but cannot read it."""
        return all(array.dtype == np.float32 for array in self._flat.values())

    def _save(self) -> tuple[Case, ...]:
        def treering() -> Work:
            tree, path = self._fresh(), self._files.new()

            def work() -> Path:
                ours.save_to_file(tree, path)
                return path

            return work

        def peer() -> Work:
            tree, path = self._fresh(), self._files.new()
            return lambda: write(path, flax.serialization.to_bytes(tree), durable=True)

        def tensors() -> Work:
            leaves, path = dict(workloads.flat(self._fresh())), self._files.new()

            def work() -> Path:
                if self._leaves == "jax":
                    safetensors.flax.save_file(leaves, path)
                else:
                    safetensors.numpy.save_file(leaves, path)
                fsync(path)
                return path

            return work

        def plain(*, durable: bool) -> Callable[[], Work]:
            def begin() -> Work:
                data, path = self._bytes, self._files.new()
                return lambda: write(path, data, durable=durable)

            return begin

        return (
            Case(name="treering", begin=treering, check=self._same_file),
            Case(name="flax + fsync", begin=peer, check=self._same_file),
            Case(name="safetensors + fsync", begin=tensors, check=self._same_tensors_file),
            Case(name="write", begin=plain(durable=False), check=self._same_file, limit=True),
            Case(name="write + fsync", begin=plain(durable=True), check=self._same_file, limit=True),
        )

    def _read(self) -> Case:
        def begin() -> Work:
            path, room = self._cached(self._packed), self._room
            return lambda: read_into(path, room)

        return Case(name="read", begin=begin, check=self._room_filled, limit=True)

    def _load(self) -> tuple[Case, ...]:
        def treering() -> Work:
            path, target = self._cached(self._packed), self._target
            return lambda: ours.load_from_file(target, path)

        def peer() -> Work:
            path, target = self._cached(self._packed), self._target
            return lambda: flax.serialization.from_bytes(target, path.read_bytes())

        def tensors() -> Work:
            path = self._cached(self._tensors)
            return lambda: safetensors.numpy.load_file(path)

        cases = [
            Case(name="treering", begin=treering, check=self._numpy_tree),
            Case(name="flax", begin=peer, check=self._numpy_tree),
            self._read(),
        ]
        if self._numpy_tensors:
            cases.insert(2, Case(name="safetensors", begin=tensors, check=self._numpy_leaves))
        return tuple(cases)

    def _load_to_jax(self) -> tuple[Case, ...]:
        def treering() -> Work:
            path, target = self._cached(self._packed), self._target
            return lambda: jax.block_until_ready(ours.load_from_file(target, path, to_jax=True))

        def peer() -> Work:
            path, target = self._cached(self._packed), self._target

            def work() -> Tree:
                tree = flax.serialization.from_bytes(target, path.read_bytes())
                moved: Tree = jax.block_until_ready(jax.device_put(tree))
                return moved

            return work

        def tensors() -> Work:
            path = self._cached(self._tensors)
            return lambda: jax.block_until_ready(safetensors.flax.load_file(path))

        return (
            Case(name="treering", begin=treering, check=self._jax_tree),
            Case(name="flax + device_put", begin=peer, check=self._jax_tree),
            Case(name="safetensors", begin=tensors, check=self._jax_leaves),
            self._read(),
        )

    def _first_leaf(self) -> tuple[Case, ...]:
        key = next(iter(self._flat))
        value = self._flat[key].reshape(-1)[:1].tobytes()

        def treering() -> Work:
            path, target = self._cached(self._packed), self._target

            def work() -> Any:
                leaf = _leaf(ours.load_from_file(target, path, mapped=True), key)
                return leaf, leaf.reshape(-1)[:1].tobytes()

            return work

        def tensors() -> Work:
            path = self._cached(self._tensors)

            def work() -> Any:
                with safetensors.safe_open(path, framework="flax") as file:
                    leaf = file.get_tensor(key)
                return leaf, np.asarray(leaf).reshape(-1)[:1].tobytes()

            return work

        def check(result: Any) -> str | None:
            leaf, first = result
            whole = equal_bytes(np.asarray(leaf), self._flat[key])
            return None if whole and first == value else f"{key}: the values differ"

        return (
            Case(name="treering", begin=treering, check=check),
            Case(name="safetensors", begin=tensors, check=check),
        )


class _SparseScene(Scene):
    """A file of 16 GiB that takes no room: 16 leaves of 1 GiB that are holes, but for their first values.

    It shows whether the time to the first leaf of a mapped file depends on the size of the file.
    """

    repeats = 3

    def __init__(self, factor: float, folder: Path) -> None:
        self._count = max(1, round(_SPARSE_LEAF // 4 * factor))
        self._path = folder / "S.msgpack"
        self._keys = [f"leaf_{index:02d}" for index in range(_SPARSE_LEAVES)]
        # A broadcast scalar has the shape of a leaf and the memory of a number.
        like = np.broadcast_to(np.float32(0), (self._count,))
        self._target = dict.fromkeys(self._keys, like)
        self.nbytes = _SPARSE_LEAVES * self._count * 4
        self.title = f"sparse file: {_SPARSE_LEAVES} leaves, {self.nbytes / _MIB:,.1f} MiB of holes"

    def prepare(self) -> None:
        """Write headers and first values, and leave the rest to the file system."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # https://github.com/msgpack/msgpack/blob/master/spec.md: 0x93 array of 3, 0x91 of 1, 0xce uint32,
        # 0xa7 str of 7, 0xc6 bin32, 0xc9 ext32, 0xde map16.
        length = (self._count * 4).to_bytes(4, "big")
        inner = b"\x93\x91\xce" + self._count.to_bytes(4, "big") + b"\xa7float32\xc6" + length
        outer = b"\xc9" + (len(inner) + self._count * 4).to_bytes(4, "big") + b"\x01"
        with self._path.open("wb") as file:
            file.write(b"\xde" + len(self._keys).to_bytes(2, "big"))
            for index, key in enumerate(self._keys):
                file.write(b"\xa7" + key.encode() + outer + inner)
                end = file.tell() + self._count * 4
                file.write(np.float32(index + 1).tobytes())
                file.truncate(end)
                file.seek(end)

    def close(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)

    def groups(self) -> tuple[Group, ...]:
        """Only the first leaf: nobody should read 16 GiB of zeros."""

        def begin() -> Work:
            return lambda: ours.load_from_file(self._target, self._path, mapped=True)["leaf_00"][0]

        def check(value: Any) -> str | None:
            return None if value == 1 else f"the first value is {value}, not 1"

        case = Case(name="treering", begin=begin, check=check)
        return (Group(name="load_from_file mapped, first leaf", cases=(case,)),)


def _scene(name: str, leaves: LeafKind, factor: float, folder: Path) -> Scene:
    """The scene of workload A, B, C or S."""
    return _SparseScene(factor, folder) if name == "S" else _MsgpackScene(name, leaves, factor, folder)


_FIRST = "load_from_file mapped, first leaf"
_GOALS = (
    Goal(row=1, workload="A", group="to_bytes", kind="faster", against="flax", bound=8.0),
    Goal(row=1, workload="A", group="to_bytes", kind="times", against="memcpy", bound=3.0),
    Goal(row=1, workload="A", group="to_bytes", kind="peak share", bound=1.02),
    Goal(row=2, workload="A", group="from_bytes", kind="faster", against="flax", bound=100.0),
    Goal(row=2, workload="A", group="from_bytes", kind="peak share", bound=0.01),
    Goal(row=3, workload="B", group="to_bytes", kind="faster", against="flax", bound=2.0, leaves="numpy"),
    Goal(row=3, workload="B", group="from_bytes", kind="faster", against="flax", bound=1.8, leaves="numpy"),
    Goal(row=4, workload="A", group="save_to_file", kind="times", against="write + fsync", bound=0.85),
    Goal(row=4, workload="A", group="save_to_file", kind="peak bytes", bound=64 * _MIB),
    Goal(row=4, workload="A", group="save_to_file", kind="faster", against="flax + fsync", bound=6.0),
    Goal(row=5, workload="A", group="load_from_file to_jax", kind="faster", against="flax + device_put", bound=6.0),
    Goal(row=5, workload="A", group="load_from_file to_jax", kind="faster", against="safetensors", bound=3.0),
    Goal(row=5, workload="A", group="load_from_file to_jax", kind="peak share", bound=1.05),
    Goal(row=5, workload="A", group=_FIRST, kind="seconds", bound=0.005),
    Goal(row=5, workload="C", group=_FIRST, kind="seconds", bound=0.005),
    Goal(row=5, workload="S", group=_FIRST, kind="seconds", bound=0.005),
)

BENCHMARK = Benchmark(
    name="msgpack",
    title="treering.serialization, flax.serialization and safetensors",
    workloads=("A", "B", "C", "S"),
    numpy_only=("S",),
    packages=("jax", "numpy", "msgpack", "flax", "safetensors"),
    scene=_scene,
    goals=_GOALS,
)
