"""Joint saves laid out: each process comes to the files that process 0 gives it, byte for byte, without a word."""

from __future__ import annotations

from array import array
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from treering._arrays import outgoing as room
from treering._arrays.outgoing import describe_leaves
from treering._arrays.written import DividedSave, SaveData, divide_save, merge_checksums
from treering._tree.flatten import flatten
from treering._values.boxes import find_cover_error, whole
from treering._values.checksums import block_count
from treering._values.processes import Processes
from treering.errors import ProcessFailed

ATTEMPT = "0123456789abcdef"
LIMITS = [1 << 30, 5000, 700]


def tree_of(process: int) -> dict[str, Any]:
    """What a process holds; what it holds alone differs from process to process in all but its shape."""
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(4, 2), ("x", "y"))
    turned = Mesh(devices[::-1], ("z",))
    few = Mesh(devices[2:5], ("q",))

    def put(on: Mesh, *shape: int, spec: Any = ()) -> jax.Array:
        array = np.arange(np.prod(shape, dtype=int), dtype="f4").reshape(shape)
        return jax.device_put(array, NamedSharding(on, P(*spec)))

    local = Mesh(devices[2 * process : 2 * process + 1 + process % 2], ("l",))
    return {
        "numpy": np.full((10, 10), process),
        "cut here or not": put(local, 8, 6, spec=("l",)),
        "rows": put(mesh, 32, 9, spec=("x",)),
        "all": put(mesh, 100, 13),
        "also": put(turned, 77),
        "turned": put(turned, 64, 3, spec=("z",)),
        "same boxes": put(turned, 64, 3, spec=("z", None)),
        "few": put(few, 9, 5, spec=("q",)),
        "empty": put(turned, 0, 8, spec=(None, "z")),
        "empty on few": put(few, 3, 0, spec=("q",)),
        "text": f"{process}" * 5000,
    }


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[DividedSave]:
    """The plan of each of four processes with two devices."""
    monkeypatch.setattr(room, "process_of", lambda device: device.id // 2)
    found = []
    for this in range(4):
        flat = flatten(tree_of(this))
        found.append(divide_save(flat.keys, describe_leaves(flat, Processes(this=this, count=4)), 4))
    return found


@pytest.mark.parametrize("limit", LIMITS)
def test_each_comes_to_the_same_files_as_process_0(plans: list[DividedSave], limit: int) -> None:
    every = plans[0].files(ATTEMPT, range(4), limit)
    assert len(set(every.names)) == len(every.names)
    assert every.writers == sorted(every.writers)
    sizes = every.sizes()
    chunks = every.chunks
    for this, plan in enumerate(plans):
        own = plan.files(ATTEMPT, [this], limit)
        mine = [file for file, writer in enumerate(every.writers) if writer == this]
        assert own.names == [every.names[file] for file in mine]
        assert own.headers == [every.headers[file] for file in mine]
        assert own.sizes() == [sizes[file] for file in mine]
        rows = [
            (chunks.leaf[n], chunks.box[n], mine.index(file), chunks.offset[n], chunks.nbytes[n], chunks.block[n])
            for n, file in enumerate(chunks.file)
            if file in mine
        ]
        kept = own.chunks
        assert rows == list(zip(kept.leaf, kept.box, kept.file, kept.offset, kept.nbytes, kept.block, strict=True))


@pytest.mark.parametrize("limit", LIMITS)
def test_every_item_is_written_once(plans: list[DividedSave], limit: int) -> None:
    files = plans[0].files(ATTEMPT, range(4), limit)
    chunks, leaves = files.chunks, plans[0].leaves
    for leaf in leaves.sources:
        shape = leaves.types[leaves.leaf_types[leaf]].shape or ()
        boxes = [chunks.box[n] or whole(shape) for n, found in enumerate(chunks.leaf) if found == leaf]
        assert find_cover_error(shape, boxes) is None


@pytest.mark.parametrize("limit", LIMITS)
def test_what_each_writes_is_what_the_arrays_hold(plans: list[DividedSave], limit: int) -> None:
    tree = tree_of(0)
    for this, plan in enumerate(plans):
        own = plan.files(ATTEMPT, [this], limit)
        chunks = own.chunks
        written = SaveData(own, None)
        for file in range(len(own.names)):
            data = own.headers[file] + b"".join(map(bytes, written.data_of(file)))
            for n, found in enumerate(chunks.file):
                key = plan.keys[chunks.leaf[n]]
                if found == file and key != "text":
                    want = np.asarray(tree[key])
                    box = chunks.box[n] or whole(want.shape)
                    part = want[tuple(slice(*side) for side in box)].tobytes()
                    assert data[chunks.offset[n] : chunks.offset[n] + chunks.nbytes[n]] == part


def test_files_end_at_their_limit(plans: list[DividedSave]) -> None:
    for limit in LIMITS:
        files = plans[0].files(ATTEMPT, range(4), limit)
        for size, header, file in zip(files.sizes(), files.headers, range(len(files.names)), strict=True):
            nbytes = [n for n, of in zip(files.chunks.nbytes, files.chunks.file, strict=True) if of == file]
            assert size - len(header) <= limit + max(nbytes)


def test_checksums_are_put_where_their_chunks_are(plans: list[DividedSave]) -> None:
    files = plans[0].files(ATTEMPT, range(4))
    chunks = files.chunks
    parts = [array("Q") for _ in range(4)]
    want = array("Q")
    for n, (file, nbytes, block) in enumerate(zip(chunks.file, chunks.nbytes, chunks.block, strict=True)):
        some = array("Q", [100 * n + k for k in range(block_count(nbytes, block))])
        parts[files.writers[file]] += some
        want += some
    assert merge_checksums(files, parts) == want
    for wrong in (parts[2][:-1], array("Q", [*parts[2], 1])):
        with pytest.raises(ProcessFailed, match="process 2 sent checksums for other chunks") as caught:
            merge_checksums(files, [*parts[:2], wrong, parts[3]])
        assert caught.value.processes == (2,)
