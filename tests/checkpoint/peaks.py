"""Run by test_memory.py in a fresh process: save and load large trees, and print the peak of each.

    python peaks.py FOLDER

Prints one JSON line for each job: its name, the bytes of its arrays, the growth of the peak, and what is kept of it.
Blocks of this size are mapped and given back by the C library, so one process can do all of them.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treering
from benchmarks.measure import trim_heap
from treering.leaves import tree_serialize_leaves

MIB = 1 << 20
SIZE = 160 * MIB
ROWS = 4096
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


def flat() -> np.ndarray[Any, Any]:
    return np.arange(SIZE // 4, dtype="f4").reshape(ROWS, -1)


def spread(*spec: Any) -> jax.Array:
    array = jax.device_put(flat(), NamedSharding(MESH, PartitionSpec(*spec)))
    return array.block_until_ready()


def status() -> dict[str, int]:
    lines = (line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(rest.split()[0]) << 10 for name, rest in lines if name in {"VmHWM", "VmRSS"}}


def measured(name: str, work: Callable[[], Any]) -> None:
    gc.collect()
    trim_heap()
    before = status()["VmRSS"]
    Path("/proc/self/clear_refs").write_text("5")
    result = work()
    after = status()
    sys.stdout.write(
        json.dumps({"name": name, "extra": after["VmHWM"] - before, "kept": after["VmRSS"] - before}) + "\n"
    )
    del result


def saves(folder: Path) -> None:
    def case(name: str, tree: Any, suffix: str = "") -> None:
        path = folder / (name.replace(" ", "_") + suffix)
        measured(f"save {name}", lambda: treering.save(path, tree))

    treering.save(folder / "warm", {"a": flat()[:100], "b": spread("x", "y")})
    case("one huge leaf", {"w": flat()})
    case("a Fortran leaf", {"w": np.asfortranarray(flat())})
    case("a turned view", {"w": flat().T})
    case("a big-endian leaf", {"w": flat().astype(">f4")})
    case("leaves of 4 MiB", [np.full(MIB, n, "f4") for n in range(SIZE // MIB // 4)])
    case("over a mesh", {"w": spread("y", "x")})
    case("by columns", {"w": spread(None, ("x", "y"))})
    copies = jax.device_put(flat()[: ROWS // 8], NamedSharding(MESH, PartitionSpec()))
    case("replicated", {"w": copies.block_until_ready()})  # or its copies would count as kept by the save
    del copies
    case("a single file", {"w": spread("y", "x")}, ".safetensors")
    case("a text of many bytes", {"t": b"x" * SIZE})


def loads(folder: Path) -> None:
    huge, mesh = folder / "one_huge_leaf", folder / "over_a_mesh"
    rows, turned = (NamedSharding(MESH, PartitionSpec(*spec)) for spec in (("x",), (None, ("y", "x"))))
    measured("load as numpy", lambda: treering.load(huge))
    measured("load to a device", lambda: treering.load(huge, shardings=jax.devices()[1]))
    measured("load rows", lambda: treering.load(huge, shardings=rows))
    measured("load columns", lambda: treering.load(huge, shardings=turned))
    measured("load another mesh", lambda: treering.load(mesh, shardings=turned))
    measured("load a mesh to one", lambda: treering.load(mesh))
    measured("load many", lambda: treering.load(folder / "leaves_of_4_MiB"))
    measured("load a single file", lambda: treering.load(folder / "a_single_file.safetensors"))

    def column() -> Any:
        with treering.open(huge) as ckpt:
            return ckpt["w"][:, 5], ckpt["w"][17, 3:9]

    measured("slice a column", column)

    def steps() -> Any:
        found = []
        for path in (huge, folder / "a_single_file.safetensors", folder / "leaves"):
            with treering.open(path) as ckpt:
                found += [ckpt["w"][::64, ::512], ckpt["w"][::-4095], ckpt["w"][1:, :: 1 << 13]]
        return found

    tree_serialize_leaves(folder / "leaves", {"w": flat()})
    measured("slice by steps", steps)


if __name__ == "__main__":
    saves(Path(sys.argv[1]))
    loads(Path(sys.argv[1]))
