"""Cases in which a plausible implementation gives wrong data, leaks a foreign error, or takes for ever."""

import functools
import io
import mmap
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.serialization
import jax
import msgpack
import numpy as np
import pytest

from tests import faults, limits
from treering import serialization
from treering.errors import CorruptError, MismatchError, TreeringError, UnsupportedError

CHUNKED = "__msgpack_chunked_array__"


def test_a_big_endian_long_double_is_converted() -> None:
    wide = np.array([1.5, -2.25], np.longdouble)
    found = serialization.msgpack_restore(serialization.to_bytes(wide.astype(wide.dtype.newbyteorder(">"))))
    assert np.array_equal(found, wide)


def test_a_chunk_that_is_itself_chunked_is_refused(tmp_path: Path) -> None:
    inner = {CHUNKED: True, "shape": {"0": 2}, "chunks": {"0": np.ones(2, np.float32)}}
    outer = {CHUNKED: True, "shape": {"0": 2}, "chunks": {"0": inner}}
    data = flax.serialization.msgpack_serialize({"a": outer}, in_place=True)
    (tmp_path / "state").write_bytes(data)
    with pytest.raises(CorruptError, match="itself chunked"):
        serialization.msgpack_restore(data)
    with pytest.raises(CorruptError, match="itself chunked"):
        serialization.load_from_file(None, tmp_path / "state")


def test_a_plain_key_called_chunks_may_hold_chunked_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    limits.lower(monkeypatch, chunk_of_state_dicts=8)
    tree: dict[str, Any] = {"chunks": {"0": np.arange(9.0)}, "shape": {"0": 1}}
    found = serialization.from_bytes(tree, serialization.to_bytes(tree), strict=True)
    assert np.array_equal(found["chunks"]["0"], np.arange(9.0))


def test_keys_that_are_numpy_scalars_or_time_stamps_come_back(tmp_path: Path) -> None:
    tree = {np.int64(3): 1, msgpack.Timestamp(1): 2, 1j: 3, np.bool_(False): 4}
    data = serialization.msgpack_serialize(tree, in_place=True)
    assert serialization.msgpack_restore(data) == tree == flax.serialization.msgpack_restore(data)


def test_keys_made_to_collide_are_refused_in_good_time() -> None:
    keys = {complex(-1000003 * n, n): None for n in range(900)}
    assert serialization.msgpack_restore(serialization.msgpack_serialize(keys, in_place=True)) == keys
    pairs = b"".join(b"\xc7\x13\x02" + msgpack.packb((float(-1000003 * n), float(n))) + b"\xc0" for n in range(20_000))
    with pytest.raises(CorruptError, match="map keys"):
        serialization.msgpack_restore(b"\xde\x4e\x20" + pairs)


@pytest.mark.parametrize("wrap", [bytearray, lambda data: memoryview(bytearray(data)).toreadonly()])
def test_what_somebody_can_still_write_to_is_copied(wrap: Any) -> None:
    data = wrap(serialization.to_bytes({"a": np.zeros(3)}))
    owner: Any = data.obj if isinstance(data, memoryview) else data
    found = serialization.msgpack_restore(data)
    owner[-1] = 9
    assert found["a"].tolist() == [0, 0, 0]


def test_a_writable_map_is_copied_and_a_read_only_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "state"
    serialization.save_to_file({"a": np.arange(3.0)}, path)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as writable:
        assert not serialization.msgpack_restore(writable)["a"].flags.writeable
    with path.open("rb") as read_only:
        fixed = mmap.mmap(read_only.fileno(), 0, access=mmap.ACCESS_READ)
    found = serialization.msgpack_restore(fixed)["a"]
    assert found.base is fixed
    assert found.tolist() == [0, 1, 2]


def test_a_part_of_bytes_is_read_in_place() -> None:
    data = b"xx" + serialization.to_bytes({"a": np.arange(3.0)})
    assert serialization.msgpack_restore(memoryview(data)[2:])["a"].tolist() == [0, 1, 2]


def test_a_handler_for_a_leaf_type_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(np.ndarray):
        pass

    counted = np.zeros(2).view(Counted)
    serialization.to_state_dict({"a": counted})
    serialization.register_serialization_state(Counted, lambda x: {"n": len(x)}, lambda x, state: state["n"])
    assert serialization.to_state_dict({"a": counted}) == {"a": {"n": 2}}
    assert serialization.from_state_dict({"a": counted}, {"a": {"n": 5}}) == {"a": 5}


def test_a_pytree_node_with_a_handler_of_its_own_in_flax_keeps_its_bytes() -> None:
    @jax.tree_util.register_pytree_with_keys_class
    class Named:
        def __init__(self, value: Any) -> None:
            self.value = value

        def tree_flatten_with_keys(self) -> Any:
            return [(jax.tree_util.GetAttrKey("value"), self.value)], None

        @classmethod
        def tree_unflatten(cls, _: Any, children: Any) -> "Named":
            return cls(*children)

    flax.serialization.register_serialization_state(
        Named, lambda x: {"other": x.value}, lambda _, state: Named(state["other"])
    )
    tree = {"a": Named(np.ones(2))}
    data = serialization.to_bytes(tree)
    assert data == flax.serialization.to_bytes(tree)
    assert np.array_equal(serialization.from_bytes(tree, data)["a"].value, np.ones(2))


class _Stateful:
    def __init__(self) -> None:
        self.weights = np.ones(3)

    def __call__(self) -> None:
        pass


class _Module(eqx.Module):
    inner: Any


@pytest.mark.parametrize("inner", [_Stateful(), functools.partial(np.add, np.ones(3))])
def test_an_object_that_can_be_called_and_may_hold_state_is_refused(inner: Any) -> None:
    with pytest.raises(UnsupportedError, match="inner"):
        serialization.to_bytes(_Module(inner))
    assert serialization.validate_serializable(_Module(inner))[0] is False


@pytest.mark.parametrize("inner", [jax.nn.relu, jax.numpy.tanh, len, functools.partial(jax.nn.gelu, approximate=True)])
def test_functions_below_a_class_come_from_the_target(inner: Any) -> None:
    module = _Module([inner, np.ones(2)])
    found = serialization.from_bytes(module, serialization.to_bytes(module), strict=True)
    assert found.inner[0] is inner


def test_a_traced_value_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="traced"):
        jax.jit(lambda x: serialization.to_bytes({"a": x}))(1.0)


def test_classes_are_no_arrays() -> None:
    assert serialization.get_serialization_info({"a": np.float32})["memory_bytes"] == 0
    with pytest.raises(MismatchError, match="a type"):
        serialization.from_bytes({"a": np.float32}, serialization.to_bytes({"a": np.ones(2)}), strict=True)


@pytest.mark.parametrize("shape", [(0, 2**61), (0, 2**62, 2**62), (2**63 - 1, 0)])
def test_an_empty_array_of_an_impossible_shape_is_refused(shape: tuple[int, ...]) -> None:
    inner = msgpack.packb((shape, "float64", b""))
    with pytest.raises(CorruptError, match="impossible"):
        serialization.msgpack_restore(msgpack.packb({"a": msgpack.ExtType(1, inner)}))


def test_an_empty_array_that_numpy_cannot_make_of_the_largest_items_is_refused() -> None:
    inner = msgpack.packb(((0, 2**58), "complex256", b""))
    with pytest.raises(CorruptError, match="impossible"):
        serialization.msgpack_restore(msgpack.packb({"a": msgpack.ExtType(1, inner)}))


@pytest.mark.parametrize("target", [[], ()], ids=str)
@pytest.mark.parametrize("leaf", [np.float32(1), np.ones(3, np.float32), np.ones((), np.float32)], ids=repr)
def test_an_array_or_a_scalar_in_the_place_of_no_items_is_told(target: Any, leaf: Any) -> None:
    data = serialization.to_bytes({"a": leaf})
    for to_jax in (False, True):
        with pytest.raises(MismatchError, match="0 items"):
            serialization.from_bytes({"a": target}, data, to_jax=to_jax)
        empty = serialization.to_bytes({"a": np.ones((0, 2), np.float32)})
        assert serialization.from_bytes({"a": target}, empty, to_jax=to_jax) == {"a": target}


def test_a_key_without_text_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="has no text"):
        serialization.to_bytes({10**5000: 1})


def test_paths_that_can_be_read_and_written_are_paths(tmp_path: Path) -> None:
    class Local(os.PathLike[str]):
        def __fspath__(self) -> str:
            return str(tmp_path / "state")

        read = write = None

    serialization.save_to_file({"a": 1}, Local())
    assert serialization.load_from_file(None, Local()) == {"a": 1}


@pytest.mark.parametrize("path", ["", "folder/", 3, b"state"])
def test_what_names_no_file_is_refused(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsupportedError):
        serialization.save_to_file({"a": 1}, path)
    with pytest.raises(UnsupportedError):
        serialization.load_from_file(None, path)
    assert not list(tmp_path.iterdir())


def test_text_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(serialization.to_bytes({"a": np.full(9, 255, np.uint8)}))
    with (tmp_path / "state").open() as file, pytest.raises(UnsupportedError, match="binary"):
        serialization.load_from_file(None, file)  # type: ignore[call-overload]
    with tempfile.NamedTemporaryFile("w") as file, pytest.raises(UnsupportedError, match="binary"):
        serialization.save_to_file({"a": 1}, file)


def test_an_open_file_is_not_mapped() -> None:
    with pytest.raises(UnsupportedError, match="mapped"):
        serialization.load_from_file(None, io.BytesIO(b"\x80"), mapped=True)


def test_many_renamed_leaves_are_reported_in_good_time() -> None:
    target = {f"old_{n}": np.zeros(1) for n in range(3000)}
    data = serialization.to_bytes({f"new_{n}": np.zeros(1) for n in range(1000)})
    start = time.process_time()
    with pytest.raises(MismatchError) as caught:
        serialization.from_bytes(target, data, strict=True)
    assert len(caught.value.differences) == 4000
    assert time.process_time() - start < 5


def test_names_from_a_file_cannot_move_the_cursor() -> None:
    data = serialization.to_bytes({"\x1b[2Jx\n" + "y" * 10_000: 1})
    with pytest.raises(MismatchError) as caught:
        serialization.from_bytes({}, data, strict=True)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_sharding_for_what_is_not_there_is_refused() -> None:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    data = serialization.to_bytes({"a": np.ones(2, np.float32)})
    with pytest.raises(MismatchError, match="aa"):
        serialization.from_bytes({"a": 0}, data, shardings={"a": device, "aa": device})


def test_a_handler_whose_dict_holds_itself_is_told() -> None:
    class Circular:
        def __init__(self) -> None:
            self.state: dict[str, Any] = {}
            self.state["self"] = self.state

    serialization.register_serialization_state(Circular, lambda x: x.state, lambda x, _: x, override=True)
    assert serialization.validate_serializable(Circular())[0] is False
    with pytest.raises(TreeringError, match="deep"):
        serialization.to_bytes(Circular())


def test_a_node_that_holds_itself_is_told() -> None:
    @jax.tree_util.register_pytree_node_class
    class Selfish:
        def tree_flatten(self) -> Any:
            return (self,), None

        @classmethod
        def tree_unflatten(cls, _: Any, __: Any) -> "Selfish":
            return cls()

    with pytest.raises(TreeringError, match="deep"):
        serialization.to_bytes({"a": Selfish()})


def test_the_staged_file_is_never_wider_than_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"old")
    path.chmod(0o600)
    modes: list[int] = []

    def note(descriptor: int, name: Any, *_: object, **__: object) -> None:
        if str(name).endswith(".treering-tmp"):
            modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))

    faults.after(monkeypatch, os, "open", note)
    serialization.save_to_file({"a": 1}, path)
    assert modes == [0o600]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_calling_us_changes_no_prototype_of_ctypes() -> None:
    import ctypes

    before = ctypes.pythonapi.PyBytes_AsString.restype
    serialization.to_bytes({"a": np.zeros(2**20)})
    assert ctypes.pythonapi.PyBytes_AsString.restype is before


@pytest.mark.parametrize(
    ("tree", "leaf"), [({1: 1, "a": 2}, None), ({"w": {"b": 0, 1: 0}}, "w"), ([0, {"b": 0, 1: 0}], "1")], ids=str
)
def test_the_dict_whose_keys_cannot_be_sorted_is_named(tree: Any, leaf: str | None) -> None:
    with pytest.raises(UnsupportedError, match="cannot be sorted") as caught:
        serialization.msgpack_serialize(tree)
    assert caught.value.path == (() if leaf is None else (leaf,))
