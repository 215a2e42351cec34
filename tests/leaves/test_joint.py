"""Several processes save one tree: threads stand for them, each with some of the devices."""

from __future__ import annotations

import functools
import json
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treering
from tests.folders import listing
from tests.leaves.jobs_of_threads import Job
from tests.leaves.saved import index_at, put, stored, visible
from tests.on_disk import is_message
from tests.store.platforms import before_syncfs
from tests.trees import assert_same_arrays
from treering.errors import ExistsError, MismatchError, ProcessFailedError, StoreError, TimedOutError, UnsupportedError
from treering.leaves import index_leaves, tree_serialize_leaves


def on_grid(array: Any, spec: P) -> jax.Array:
    return put(array, spec, (2, 4), ("a", "b"))


def tree_of() -> dict[str, Any]:
    """Leaves of every kind: sharded, replicated, both, held by one process alone, no arrays."""
    return {
        "rows": put(jnp.arange(64.0).reshape(8, 8), P("x")),
        "whole": put(jnp.arange(10, dtype="int16"), P()),
        "halves": on_grid(jnp.arange(16, dtype="bfloat16"), P("a")),
        "grid": on_grid(jnp.arange(64.0).reshape(8, 8), P("a", "b")),
        "columns": on_grid(jnp.arange(24.0).reshape(3, 8), P(None, "b")),
        "none": put(jnp.zeros((0, 8)), P(None, "x")),
        "scalar": put(jnp.float32(3), P()),
        "key": put(jax.random.key(3), P()),
        "own": jnp.arange(3),
        "host": np.arange(5, dtype="u1"),
        "long": "text " * 20_000,
        "step": 7,
        "names": ["a", None],
    }


@pytest.fixture(params=[2, 4])
def job(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch, request.param)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch, 2)


def all_well(errors: dict[int, BaseException | None]) -> None:
    for error in errors.values():
        if error is not None:
            raise error


def all_failed(
    errors: dict[int, BaseException | None], kind: type[Exception] | tuple[type[Exception], ...], match: str
) -> None:
    for this, error in errors.items():
        assert isinstance(error, kind), (this, error)
        assert re.search(match, str(error), re.DOTALL), (this, str(error))


def notes_at(path: Path) -> list[str]:
    return [entry.name for entry in path.iterdir() if is_message(entry.name)]


def unnamed(path: Path) -> dict[str, bytes]:
    """All files there, with neither attempts nor times, nor how many processes wrote them."""
    index = (path / "tensorstore_index.json").read_text()
    attempts = set(re.findall(r'attempt\\": \\"([0-9a-f]{16})', index))
    found = {}
    for name, data in listing(path).items():
        known, content = name, data or b""
        for attempt in attempts:
            known = known.replace(attempt, "ATTEMPT")
            content = content.replace(attempt.encode(), b"ATTEMPT")
        if name.endswith(".json"):
            content = re.sub(rb"xxh3-128:[0-9a-f]{32}|\d{4}-\d\d-\d\dT[0-9:.+]*|,\\*\"processes\\*\":\d", b"", content)
        found[known] = content
    return found


# ------------------------------------------------------------------------------------------------------- what is saved


def test_what_is_saved_is_what_one_process_saves(job: Job, tmp_path: Path) -> None:
    """The files are the same to the byte, the record too, but for what says who wrote it, and when."""
    tree = tree_of()
    all_well(job.save(tmp_path / "all", tree))
    tree_serialize_leaves(tmp_path / "one", tree)
    assert unnamed(tmp_path / "all") == unnamed(tmp_path / "one")
    assert_same_arrays(stored(tmp_path / "all"), tree)
    assert treering.verify(tmp_path / "all").ok
    assert notes_at(tmp_path / "all") == []


@pytest.mark.parametrize("compressor", [None, {"id": "zstd", "level": 1}])
def test_compressed_and_cut(job: Job, tmp_path: Path, compressor: dict[str, Any] | None) -> None:
    tree = tree_of()
    del tree["long"]  # that would be thousands of files
    all_well(job.save(tmp_path / "all", tree, compressor=compressor, chunk_bytes=16))
    tree_serialize_leaves(tmp_path / "one", tree, compressor=compressor, chunk_bytes=16)
    assert unnamed(tmp_path / "all") == unnamed(tmp_path / "one")


def test_what_all_hold_is_cut_and_shared(job: Job, tmp_path: Path) -> None:
    """Leaves larger than a tenth of a share are written by all, about equally; any reader sees one array."""
    told: dict[int, list[tuple[int, int]]] = {this: [] for this in range(job.count)}
    tree = {
        "large": put(jnp.arange(3 << 20, dtype="f4").reshape(-1, 64), P()),
        "more": put(jnp.ones((1 << 20), "f4"), P()),
        "rows": put(jnp.arange(8 << 17, dtype="f4"), P("x")),
    }
    asked = {this: {"progress": lambda *done, this=this: told[this].append(done)} for this in range(job.count)}
    all_well(job.save(tmp_path, tree, asked=asked))
    totals = [done[-1][1] for done in told.values()]
    total = sum(leaf.nbytes for leaf in tree.values())
    assert total <= sum(totals) <= total * 1.01  # what the last chunk is padded with
    assert max(totals) <= 1.10 * sum(totals) / job.count
    assert all(done[-1][0] == done[-1][1] for done in told.values())
    assert_same_arrays(stored(tmp_path), tree)
    assert treering.verify(tmp_path).ok


def test_prefixes_overwrites_and_other_numbers_of_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tree = tree_of()
    four = Job(monkeypatch, 4)
    all_well(four.save(tmp_path, tree))
    all_well(four.save(tmp_path, {"w": tree["rows"]}, prefix="model"))
    all_well(four.save(tmp_path, {"w": tree["grid"]}, prefix="ema.x"))
    assert set(index_at(tmp_path)["prefixes"]) == {"model", "ema.x"}
    two = Job(monkeypatch, 2, "fedcba9876543210")
    all_well(two.save(tmp_path, {"w": tree["columns"], "v": 1}, prefix="model"))
    assert_same_arrays(stored(tmp_path, "model"), {"w": tree["columns"], "v": 1})
    assert_same_arrays(stored(tmp_path, "ema.x"), {"w": tree["grid"]})
    tree_serialize_leaves(tmp_path, {"rows": jnp.ones(3)})
    assert set(stored(tmp_path)) == {"rows"}
    all_well(two.save(tmp_path, tree))
    assert_same_arrays(stored(tmp_path), tree)
    assert treering.verify(tmp_path).ok
    assert len(list((tmp_path / ".treering").iterdir())) == 3


def test_without_an_index(job: Job, tmp_path: Path) -> None:
    called: list[int] = []
    asked = {
        this: {"write_index": False, "commit_callback": functools.partial(called.append, this)}
        for this in range(job.count)
    }
    tree = tree_of()
    all_well(job.save(tmp_path, tree, asked=asked))
    assert called == [0]
    assert not (tmp_path / "tensorstore_index.json").exists()
    index_leaves(tmp_path)
    assert_same_arrays(stored(tmp_path), tree)
    assert treering.verify(tmp_path).ok


# ----------------------------------------------------------------------------- what each process has, and what is asked


def test_leaves_of_one_process_alone_are_those_of_process_0(job: Job, tmp_path: Path) -> None:
    tree = tree_of()
    others = {this: {**tree, "host": np.full(5, this, "u1"), "step": this} for this in range(1, job.count)}
    all_well(job.save(tmp_path, tree, trees=others))
    found = stored(tmp_path)
    assert (found["step"], found["host"].tolist()) == (7, [0, 1, 2, 3, 4])


def test_differences_are_reported_on_request(job: Job, tmp_path: Path) -> None:
    tree = tree_of()
    all_well(job.save(tmp_path, tree, host_local="equal"))
    before = visible(tmp_path), stored(tmp_path)["step"]
    last = job.count - 1
    other = {**tree, "host": np.full(5, 9, "u1"), "step": 8}
    errors = job.save(tmp_path, {**tree, "step": 6}, trees={last: {**other, "step": 8}}, host_local="equal")
    all_failed(errors, MismatchError, f"leaf 'host' differs on process {last}.*leaf 'step' differs")
    assert (visible(tmp_path), stored(tmp_path)["step"]) == before


def test_other_trees_and_other_arguments_are_refused(job: Job, tmp_path: Path) -> None:
    tree = tree_of()
    all_well(job.save(tmp_path, {"w": tree["rows"]}))
    before = listing(tmp_path)
    last = job.count - 1
    other = {**tree, "rows": put(jnp.zeros((4, 8)), P())}
    all_failed(job.save(tmp_path, tree, trees={last: other}), MismatchError, r"leaf 'rows'.*\[4, 8\]")
    all_failed(job.save(tmp_path, tree, trees={last: {"w": 1}}), MismatchError, "leaves, this process 1")
    asked = {last: {"chunk_bytes": 8}}
    all_failed(job.save(tmp_path, tree, asked=asked), MismatchError, "different arguments.*chunk_bytes")
    assert listing(tmp_path) == before


def test_what_one_process_cannot_save_all_are_told(job: Job, tmp_path: Path) -> None:
    tree = tree_of()
    gone = jnp.ones(3)
    gone.delete()
    for this in (0, job.count - 1):
        errors = job.save(tmp_path / "new", tree, trees={this: {**tree, "own": gone}})
        all_failed(errors, UnsupportedError, r"deleted.*leaf 'own'")
        others = [str(error) for other, error in errors.items() if other != this]
        assert all(f"process {this}" in text for text in others)
    assert not (tmp_path / "new").exists()
    all_well(job.save(tmp_path / "new", tree))


def test_parts_that_are_no_grid(pair: Job, tmp_path: Path) -> None:
    """No process holds a whole chunk: that is refused, with the name of the leaf, by all."""
    pair.hold((((0, 2),), (0,)), (((2, 8),), (1,)))
    errors = pair.save(tmp_path / "ckpt", {"w": put(jnp.arange(8), P("x"))})
    all_failed(errors, UnsupportedError, r"no grid.*leaf 'w'.*treering\.save")
    assert not (tmp_path / "ckpt").exists()


# ------------------------------------------------------------------------------------------------------ what goes wrong


def test_a_process_that_cannot_write(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the attempt is left, the old tree is whole, the next save works."""
    tree = tree_of()
    all_well(job.save(tmp_path, {"w": tree["rows"]}))
    before = listing(tmp_path)

    def fail(_: int) -> None:
        if job.this:
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        before_syncfs(patch, fail)
        all_failed(job.save(tmp_path, tree), (StoreError, ProcessFailedError), "Input/output error")
    assert listing(tmp_path) == before
    all_well(job.save(tmp_path, tree))
    assert treering.verify(tmp_path).ok


def test_process_0_cannot_write(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tree_of()
    all_well(job.save(tmp_path, {"w": tree["rows"]}))
    before = listing(tmp_path)

    def fail(_: int) -> None:
        if job.this == 0:
            raise OSError(28, "No space left on device")

    before_syncfs(monkeypatch, fail)
    all_failed(job.save(tmp_path, tree), (StoreError, ProcessFailedError, OSError), "No space left")
    assert listing(tmp_path) == before


def test_files_of_others_in_the_way_of_any_process(job: Job, tmp_path: Path) -> None:
    """Process 0 looks for the places of all files, also of those that others have written."""
    tree = {"rows": put(jnp.arange(64.0).reshape(8, 8), P("x"))}
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "7.0").write_bytes(b"mine")
    all_failed(job.save(tmp_path, tree), ExistsError, r"rows.7\.0")
    assert visible(tmp_path) == {"rows/7.0"}
    assert (tmp_path / "rows" / "7.0").read_bytes() == b"mine"


def test_a_checkpoint_is_there(job: Job, tmp_path: Path) -> None:
    treering.save(tmp_path / "ckpt", {"w": np.ones(3)})
    before = listing(tmp_path)
    all_failed(job.save(tmp_path / "ckpt", tree_of()), ExistsError, "checkpoint of treering.save")
    assert listing(tmp_path) == before


def test_who_does_not_come_is_named(pair: Job, tmp_path: Path) -> None:
    """What is left has no lock and no record; the next save removes it, and the notes."""
    tree = tree_of()
    all_well(pair.save(tmp_path, {"w": tree["rows"]}))
    errors = pair.save(tmp_path, tree, absent=(1,), timeout=1)
    all_failed(errors, TimedOutError, "process 1")
    error = errors[0]
    assert isinstance(error, TimedOutError)
    assert error.missing == (1,)
    assert set(stored(tmp_path)) == {"w"}
    left = tmp_path / ".treering" / pair.attempt
    assert left.exists()
    assert not (left / "record.json").exists()
    assert treering.verify(tmp_path).ok
    all_well(pair.save(tmp_path, tree))
    assert not left.exists()
    assert notes_at(tmp_path) == []
    assert set(stored(tmp_path)) == set(tree)


def test_process_0_does_not_come(pair: Job, tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path, {"w": jnp.ones(3)})
    all_failed(pair.save(tmp_path, tree_of(), absent=(0,), timeout=1), TimedOutError, "process 0")
    assert set(stored(tmp_path)) == {"w"}
    # What processes say to each other disturbs nobody, and whoever saves next removes it.
    attempt = pair.attempt
    for name in (f".treering-{attempt}-part-00001", ".treering-waiting-00001", f".treering-{pair.name}-begin"):
        (tmp_path / name).write_bytes(b"{}")
    assert treering.verify(tmp_path).ok
    index_leaves(tmp_path)
    (tmp_path / "tensorstore_index.json").unlink()
    index_leaves(tmp_path)
    assert set(stored(tmp_path)) == {"w"}
    tree_serialize_leaves(tmp_path, {"v": jnp.ones(3)})
    assert notes_at(tmp_path) == []


def test_process_0_hears_of_its_later_calls_that_they_are_given_up(pair: Job, tmp_path: Path) -> None:
    tree = {"w": tree_of()["rows"]}
    for _ in range(2):
        all_failed(pair.save(tmp_path / "new", tree, absent=(0,), timeout=0.2), TimedOutError, "process 0")
    pair.calls = 0
    for _ in range(2):
        error = pair.save(tmp_path / "new", tree, absent=(1,), timeout=0.2)[0]
        assert isinstance(error, TimedOutError)
        assert "process 0 did not arrive" in str(error), error  # as process 1 said, not that process 1 did not come
    all_well(pair.save(tmp_path / "new", tree))
    assert notes_at(tmp_path / "new") == []


def test_staged_files_that_another_saver_swept(pair: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower whose folder was removed while it wrote says so; it never stands for data that is gone."""
    real = os.fstatvfs
    attempts = tmp_path / ".treering"

    def removed(descriptor: int) -> os.statvfs_result:
        found = real(descriptor)
        if pair.this:  # it asks for space when it has the folder, and before it writes
            (attempts / pair.attempt).rename(attempts / "elsewhere")
            (attempts / pair.attempt / "leaves").mkdir(parents=True)
        return found

    monkeypatch.setattr(os, "fstatvfs", removed)
    all_failed(pair.save(tmp_path, tree_of()), (StoreError, ProcessFailedError), "was removed while it was written")


def test_the_record_says_what_lies_there(pair: Job, tmp_path: Path) -> None:
    """The index is plain JSON that lists every array once, whoever wrote it."""
    tree = tree_of()
    all_well(pair.save(tmp_path, tree, prefix="model"))
    index = json.loads((tmp_path / "tensorstore_index.json").read_text())
    paths = [entry["path"] for entry in index["prefixes"]["model"]]
    assert len(paths) == len(set(paths)) == 10
