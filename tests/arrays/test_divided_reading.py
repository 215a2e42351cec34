"""Who reads what of leaves that lie over processes, and what the processes compare before they begin."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import treering as tr
from treering._arrays import exchange
from treering._arrays.delivered import Delivery
from treering._arrays.divided_reading import divide, plan_digest, rounds, spans, state_digest
from treering._arrays.source import Source
from treering._checkpoint.forms import read_source
from treering._checkpoint.read_leaves import plan_deliveries
from treering._format.selection import select
from treering._tree.likeness import match_stored
from treering._values.boxes import find_cover_error, size_of
from treering.leaves import tree_serialize_leaves

MESH = Mesh(np.array(jax.devices()), ("x",))
ROWS, COLUMNS = NamedSharding(MESH, P("x")), NamedSharding(MESH, P(None, "x"))
SWAPPED = Mesh(np.array([jax.devices()[n] for n in (1, 0, 2, 3, 4, 5, 6, 7)]), ("x",))
"""The same boxes for each process, on other devices of it."""
SHAPE = (1024, 512)


@pytest.fixture(autouse=True)
def _as_four_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "process_of", lambda device: device.id // 2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    tree = {key: np.zeros(SHAPE, np.float32) for key in "abc"} | {"four": np.zeros(SHAPE, jnp.dtype("float4_e2m1fn"))}
    tr.save(path / "ckpt", {key: jnp.asarray(array) for key, array in tree.items()})
    tr.save(path / "one.msgpack", {"a": tree["a"]})
    tree_serialize_leaves(path / "leaves", {"a": tree["a"]}, chunk_bytes=256 << 10)
    tree_serialize_leaves(
        path / "packed", {"a": tree["a"]}, chunk_bytes=256 << 10, compressor={"id": "zlib", "level": 1}
    )
    return path


def deliveries_of(source: Source, shardings: list[Any]) -> list[Delivery]:
    index = source.index
    part = select(index.structure, index.keys, at=None, only=None)
    matches = [
        dataclasses.replace(match, fit=dataclasses.replace(match.fit, kind="jax"))
        for match in match_stored(index, part)
    ]
    return plan_deliveries(source, matches, shardings)[1]


def test_a_sharding_of_several_processes_spans() -> None:
    assert spans(ROWS)
    assert not spans(None)
    assert not spans(SingleDeviceSharding(jax.devices()[5]))
    assert not spans(NamedSharding(Mesh(np.array(jax.devices()[2:4]), "x"), P("x")))
    assert spans(NamedSharding(Mesh(np.array(jax.devices()[1:3]), "x"), P()))


def test_only_leaves_over_several_processes_are_divided(saved: Path) -> None:
    with read_source(saved / "ckpt", mapped=False) as source:
        one = SingleDeviceSharding(jax.devices()[0])
        deliveries = deliveries_of(source, [COLUMNS, one, NamedSharding(MESH, P()), COLUMNS])
        wholes = [delivery.request.boxes for delivery in deliveries]
        divide(source, deliveries, 4)
        a, b, c, four = deliveries
        assert a.parts is not None
        assert find_cover_error(SHAPE, list(a.request.boxes)) is None  # all eight devices are here
        assert all(box[1] == (0, SHAPE[1]) for box in a.request.boxes)
        assert [b.parts, c.parts] == [None, None]
        assert [b.request.boxes, c.request.boxes] == wholes[1:3]
        # Floats of four bits cannot be exchanged.
        assert four.parts is None
        assert four.nbytes == sum(map(size_of, four.request.boxes))


@pytest.mark.parametrize(("name", "exchanged"), [("leaves", True), ("packed", True), ("one.msgpack", False)])
def test_forms(saved: Path, name: str, exchanged: bool) -> None:
    with read_source(saved / name, mapped=False) as source:
        deliveries = deliveries_of(source, [COLUMNS])
        divide(source, deliveries, 4)
        assert (deliveries[0].parts is not None) is exchanged
        if name == "packed":
            assert [chunk.block for chunk in source.arrays.stored_chunks(0)] == [256 << 10] * 8
            assert deliveries[0].parts is not None
            assert deliveries[0].parts.rows % 128 == 0


def test_rounds_hold_so_many_bytes_for_the_busiest(saved: Path) -> None:
    with read_source(saved / "ckpt", mapped=False) as source:
        deliveries = deliveries_of(source, [COLUMNS] * 4)[:3]
        divide(source, deliveries, 4)
        each = 1024 * 512 * 4 // 4
        sizes = [[len(some) for some in rounds(deliveries, 4, most)] for most in (1, each, each + 1, 3 * each, 1 << 30)]
        assert sizes == [[1, 1, 1], [1, 1, 1], [2, 1], [3], [3]]


def test_other_wishes_have_another_digest(saved: Path) -> None:
    with read_source(saved / "ckpt", mapped=False) as source:

        def digest_of(*shardings: Any, batches: bool = False) -> str:
            deliveries = deliveries_of(source, list(shardings))
            divide(source, deliveries, 4)
            return plan_digest([[one] for one in deliveries] if batches else [deliveries])

        first = digest_of(COLUMNS, COLUMNS, ROWS, None)
        assert digest_of(COLUMNS, COLUMNS, NamedSharding(MESH, P("x", None)), None) == first
        # What lies with one process is its own concern.
        assert digest_of(COLUMNS, COLUMNS, ROWS, SingleDeviceSharding(jax.devices()[2])) == first
        others = [
            digest_of(COLUMNS, ROWS, COLUMNS, None),
            digest_of(COLUMNS, COLUMNS, None, None),
            digest_of(COLUMNS, COLUMNS, ROWS, None, batches=True),
            digest_of(NamedSharding(Mesh(np.array(jax.devices()[::-1]), ("x",)), P(None, "x")), COLUMNS, ROWS, None),
            digest_of(NamedSharding(SWAPPED, P(None, "x")), COLUMNS, ROWS, None),
        ]
        assert len({first, *others}) == 6


def test_another_save_has_another_state(tmp_path: Path) -> None:
    states = []
    for number in range(2):
        tr.save(tmp_path / "ckpt", {"w": np.zeros(3)}, overwrite=True)
        tr.save(tmp_path / "one.safetensors", {f"w{number}": np.zeros(3)}, overwrite=True)
        for name in ("ckpt", "one.safetensors", "ckpt", "one.safetensors"):
            with read_source(tmp_path / name, mapped=False) as source:
                states.append(state_digest(source))
    assert states[:2] == states[2:4]
    assert len(set(states)) == 4
