"""Which process reads what of leaves that lie over processes, and what they compare before they begin."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import treering as tr
from tests import faults, meshes
from tests.checkpoint.together import Loading, exchange_at_once, loading
from tests.system_calls import spans_read
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves

__all__ = ["loading"]

MESH = meshes.line()
ROWS, COLUMNS = NamedSharding(MESH, P("x")), NamedSharding(MESH, P(None, "x"))
SWAPPED = Mesh(np.array([jax.devices()[n] for n in (1, 0, 2, 3, 4, 5, 6, 7)]), ("x",))
"""The same boxes for each process, on other devices of it."""
SHAPE = (1024, 512)
WIDE = np.arange(1024 * 512, dtype=np.float32).reshape(SHAPE)
CHUNKS = 8


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    tree = {key: jnp.asarray(WIDE + n) for n, key in enumerate("abc")}
    tr.save(path / "ckpt", {**tree, "four": jnp.asarray(WIDE % 5).astype("float4_e2m1fn")})
    tr.save(path / "one.msgpack", {"a": WIDE})
    tree_serialize_leaves(path / "leaves", tree, chunk_bytes=256 << 10)
    tree_serialize_leaves(path / "packed", {"a": WIDE}, chunk_bytes=256 << 10, compressor={"id": "zlib", "level": 1})
    tree_serialize_leaves(path / "one chunk", {"a": WIDE}, compressor={"id": "zlib", "level": 1})
    return path


@pytest.mark.parametrize(
    ("sharding", "meets"),
    [
        (ROWS, True),
        (None, False),
        (SingleDeviceSharding(jax.devices()[5]), False),
        (NamedSharding(Mesh(np.array(jax.devices()[2:4]), "x"), P("x")), False),
        (NamedSharding(Mesh(np.array(jax.devices()[1:3]), "x"), P()), True),
    ],
)
def test_a_sharding_of_several_processes_is_their_common_matter(
    loading: Loading, saved: Path, sharding: Any, meets: bool
) -> None:
    found = tr.load(saved / "ckpt", only="a", shardings=sharding)["a"]
    assert np.array_equal(found, WIDE)
    assert bool(loading.meetings) is meets


def test_only_leaves_over_several_processes_are_divided(
    loading: Loading, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = spans_read(monkeypatch)
    one = SingleDeviceSharding(jax.devices()[0])
    shardings = {"a": COLUMNS, "b": one, "c": NamedSharding(MESH, P()), "four": COLUMNS}
    found = tr.load(saved / "ckpt", shardings=shardings)
    for number, key in enumerate("abc"):
        assert found[key].sharding == shardings[key]
        assert np.array_equal(found[key], WIDE + number)
    # Floats of four bits cannot be exchanged.
    assert np.array_equal(found["four"].astype("f4"), WIDE % 5)
    assert loading.exchanges == [1]
    assert sum(count for _, count in spans) == (3 * 4 + 1) * WIDE.size


@pytest.mark.parametrize(("name", "exchanged"), [("leaves", True), ("packed", True), ("one.msgpack", False)])
def test_forms(loading: Loading, saved: Path, name: str, exchanged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def watched(path: Any, *arguments: Any, **options: Any) -> None:
        name = os.path.basename(os.fspath(path))  # noqa: PTH119 - it may be bytes
        if re.fullmatch(r"\d+\.\d+", str(name)):
            opened.append(name)

    faults.before(monkeypatch, os, "open", watched)
    assert np.array_equal(tr.load(saved / name, only="a", shardings=COLUMNS)["a"], WIDE)
    assert loading.exchanges == [1] * exchanged
    # All devices are here: no chunk is read for two of them, though each is unpacked as a whole.
    assert len(opened) == len(set(opened)) == (CHUNKS if exchanged else 0)


def test_rows_are_read_by_those_who_want_them_unless_a_chunk_is_one_whole(loading: Loading, saved: Path) -> None:
    for name, exchanged in (("ckpt", False), ("leaves", False), ("one chunk", True)):
        loading.exchanges.clear()
        assert np.array_equal(tr.load(saved / name, only="a", shardings=ROWS)["a"], WIDE)
        assert loading.exchanges == [1] * exchanged


def test_rounds_hold_so_many_bytes_for_the_busiest(
    loading: Loading, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = WIDE.nbytes // 4
    sizes = []
    for most in (1, each, each + 1, 3 * each, 1 << 30):
        exchange_at_once(monkeypatch, most)
        loading.exchanges.clear()
        tr.load(saved / "ckpt", only=["a", "b", "c"], shardings=COLUMNS)
        sizes.append(list(loading.exchanges))
    assert sizes == [[1, 1, 1], [1, 1, 1], [2, 1], [3], [3]]


def plan_of(loading: Loading, path: Path, *shardings: Any, batch: int | None = None) -> str:
    """Return what this process says of its plan."""
    loading.meetings.clear()
    wanted = dict(zip("abc", shardings, strict=True))
    if path.name == "leaves":
        tree_deserialize_leaves(path, shardings=wanted, callback=lambda array, key: array, chunk_size=batch)
    else:
        tr.load(path, only=list("abc"), shardings=wanted)
    return str(loading.meetings[0]["plan"])


def test_other_wishes_have_another_plan(loading: Loading, saved: Path) -> None:
    path = saved / "ckpt"
    first = plan_of(loading, path, COLUMNS, ROWS, None)
    assert plan_of(loading, path, COLUMNS, NamedSharding(MESH, P("x", None)), None) == first
    # What lies with one process is its own concern.
    assert plan_of(loading, path, COLUMNS, ROWS, SingleDeviceSharding(jax.devices()[2])) == first
    others = [
        plan_of(loading, path, ROWS, COLUMNS, None),
        plan_of(loading, path, COLUMNS, None, None),
        plan_of(loading, path, NamedSharding(Mesh(np.array(jax.devices()[::-1]), ("x",)), P(None, "x")), ROWS, None),
        plan_of(loading, path, NamedSharding(SWAPPED, P(None, "x")), ROWS, None),
    ]
    assert len({first, *others}) == 5


def test_other_batches_have_another_plan(loading: Loading, saved: Path) -> None:
    plans = [plan_of(loading, saved / "leaves", COLUMNS, COLUMNS, ROWS, batch=batch) for batch in (1, 2, 3, 3)]
    assert plans[2] == plans[3]
    assert len(set(plans)) == 3


def test_another_save_has_another_state(loading: Loading, tmp_path: Path) -> None:
    states = []
    for number in range(2):
        tr.save(tmp_path / "ckpt", {"w": np.zeros(8)}, overwrite=True)
        tr.save(tmp_path / "one.safetensors", {f"w{number}": np.zeros(8)}, overwrite=True)
        for name in ("ckpt", "one.safetensors", "ckpt", "one.safetensors"):
            loading.meetings.clear()
            with jax.enable_x64(True):
                tr.load(tmp_path / name, shardings=ROWS)
            states.append(loading.meetings[0]["state"])
    assert states[:2] == states[2:4]
    assert len(set(states)) == 4
