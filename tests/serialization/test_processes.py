"""Several threads at once, and arrays that this process holds only a part of."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path

import numpy as np

from tests import warm
from tests.trees import assert_same
from torture.ports import free_port
from treering import serialization

WORKER = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
port, process = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, initialization_timeout=60)
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from treering import serialization
from treering.errors import TreeringError

mesh = Mesh(np.array(jax.devices()), ("x",))
whole = np.arange(8, dtype=np.float32)
spread = jax.make_array_from_callback((8,), NamedSharding(mesh, PartitionSpec("x")), lambda index: whole[index])
copied = jax.make_array_from_callback((8,), NamedSharding(mesh, PartitionSpec()), lambda index: whole[index])
assert not spread.is_fully_addressable
saves = (serialization.to_bytes, serialization.msgpack_serialize, lambda t: serialization.save_to_file(t, sys.argv[3]))
for save in saves:
    try:
        save({"a": {"w": spread}})
    except TreeringError as error:
        assert isinstance(error, ValueError), error
        assert error.path == ("a", "w"), error.path
    else:
        raise AssertionError("an array that is elsewhere was saved")
valid, issues = serialization.validate_serializable({"a": {"w": spread, "x": 1}})
assert not valid and len(issues) == 1 and "a/w" in issues[0], issues
try:
    data = serialization.to_bytes({"w": copied})
except TreeringError:
    pass
else:
    assert data == serialization.to_bytes({"w": whole})
print("fine")
"""


def test_an_array_that_is_not_fully_addressable_is_refused_with_its_path(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER, encoding="utf-8")
    port, target = str(free_port()), tmp_path / "never" / "state"
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda process: warm.run(str(script), port, process, str(target)), ("0", "1")))
    assert [(one.returncode, one.stdout) for one in done] == [(0, "fine\n")] * 2, done
    assert not target.parent.exists()


def test_threads_do_not_share_their_place() -> None:
    class Watcher:
        pass

    seen: list[str] = []

    def restore(node: Watcher, state: dict[str, int]) -> int:
        seen.append(serialization.current_path())
        return state["n"]

    serialization.register_serialization_state(Watcher, lambda node: {"n": 1}, restore)
    trees = [{f"thread{number}": [Watcher()] * 50} for number in range(8)]
    blobs = [serialization.to_bytes(tree) for tree in trees]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(serialization.from_bytes, trees, blobs))
    assert results == [{f"thread{number}": [1] * 50} for number in range(8)]
    assert sorted(seen) == sorted(f"./thread{number}/{index}" for number in range(8) for index in range(50))


def test_threads_save_and_load_at_once(tmp_path: Path) -> None:
    def one(number: int) -> None:
        tree = {"w": np.full(50_000, number, np.int32)}
        for name in (f"own{number}", "shared"):
            serialization.save_to_file(tree, tmp_path / name)
        assert_same(serialization.load_from_file(None, tmp_path / f"own{number}"), tree)
        shared = serialization.load_from_file(None, tmp_path / "shared")["w"]
        assert len(set(shared.tolist())) == 1

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(one, range(12)))
    assert len(list(tmp_path.iterdir())) == 13
