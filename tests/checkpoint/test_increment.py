"""``save(base=)``: what is not written again, and that each checkpoint stays whole whatever becomes of the others."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

import treering as tr
from tests import limits
from tests.checkpoint.in_background import write_by_threads
from tests.checkpoint.together import PATIENT, Together, job_of, together, two
from tests.command import here
from tests.compat import independent_reader
from tests.stores import store_at
from treering._arrays.outgoing import ALONE
from treering._arrays.plan_cache import plan_tree
from treering._background.writer import Watch
from treering._checkpoint import save_folder
from treering._checkpoint.save_options import SaveOptions
from treering._store.posix.reading import LocalFile
from treering.errors import MismatchError, NotFoundError, StoreError, UnsupportedError
from treering.leaves import tree_serialize_leaves

__all__ = ["together", "two"]


@pytest.fixture(autouse=True)
def small_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves of more than a KiB are compared in parts."""
    limits.lower(monkeypatch, compared_box=1024)


def tree_of(seed: int = 0) -> dict[str, Any]:
    """A stacked leaf of ten layers, a KiB each, and others of every kind."""
    return {
        "layers": np.arange(2560, dtype=np.float32).reshape(10, 256) + seed,
        "bias": np.arange(7.0),
        "text": "words " * 1000,
        "key": jax.random.key(3),
        "empty": np.zeros((0, 4)),
        "on device": jnp.arange(300, dtype=jnp.bfloat16).reshape(3, 100),
        "step": 5,
    }


def same(one: Any, other: Any) -> bool:
    """Whether two trees of `tree_of` are equal bit for bit."""
    found = [
        (jax.random.key_data(leaf) if key == "key" else leaf, jax.random.key_data(twin) if key == "key" else twin)
        for (key, leaf), (_, twin) in zip(sorted(one.items()), sorted(other.items()), strict=True)
    ]
    return all(type(a) is type(b) and np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in found)


def index(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((path / "treering.json").read_text())
    return document


def written(path: Path) -> int:
    """Bytes of the data files that no other checkpoint has."""
    return sum(file.stat().st_size for file in path.glob("data-*") if file.stat().st_nlink == 1)


def numbers_of(path: Path) -> set[int]:
    return {file.stat().st_ino for file in path.glob("data-*")}


def test_an_unchanged_tree_shares_all_its_files(tmp_path: Path) -> None:
    tree = tree_of()
    tr.save(tmp_path / "a", tree)
    for base, path in ("ab", "bc"):
        tr.save(tmp_path / path, tree, base=tmp_path / base)
        assert written(tmp_path / path) == 0
        assert numbers_of(tmp_path / path) == numbers_of(tmp_path / base)
    names = {file.name for path in "abc" for file in (tmp_path / path).glob("data-*")}
    assert len(names) == 3  # of three attempts
    shutil.rmtree(tmp_path / "a")
    shutil.rmtree(tmp_path / "b")
    assert tr.verify(tmp_path / "c").ok
    assert same(tr.load(tmp_path / "c"), tree)
    assert index(tmp_path / "c")["treering"] == 1  # every reader reads it


@pytest.mark.skipif(os.name == "nt", reason="Windows removes no file that is read-only")
def test_shared_files_are_read_only_and_can_be_removed(tmp_path: Path) -> None:
    tr.save(tmp_path / "a", tree_of())
    tr.save(tmp_path / "b", tree_of(), base=tmp_path / "a")
    for file in (tmp_path / "a").glob("data-*"):
        assert not file.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH)
    tr.save(tmp_path / "b", {"w": 1.5}, overwrite=True)
    assert not list((tmp_path / "b").glob("data-*"))
    assert same(tr.load(tmp_path / "a"), tree_of())


def test_one_layer_of_a_stacked_leaf_is_all_that_is_written(tmp_path: Path) -> None:
    tree = tree_of()
    tr.save(tmp_path / "a", tree)
    tree["layers"] = tree["layers"].copy()
    tree["layers"][4] += 1
    tr.save(tmp_path / "b", tree, base=tmp_path / "a")
    assert written(tmp_path / "b") == 4096 + 1024
    assert index(tmp_path / "b")["treering"] == 5  # a shared file has bytes of no leaf
    assert tr.verify(tmp_path / "b").ok
    assert same(tr.load(tmp_path / "b"), tree)
    assert same(tr.load(tmp_path / "a"), tree_of())
    found, leaves = independent_reader.read(tmp_path / "b")
    assert leaves["layers"].tobytes() == tree["layers"].tobytes()
    assert found["step"] == 5
    with tr.open(tmp_path / "b") as opened:
        assert np.array_equal(opened["layers"][3:6], tree["layers"][3:6])


def test_a_file_of_which_less_than_half_is_used_is_written_anew(tmp_path: Path) -> None:
    tree = tree_of()
    tr.save(tmp_path / "0", tree)
    for layer in range(10):
        tree["layers"] = tree["layers"].copy()
        tree["layers"][layer] += 1
        tr.save(tmp_path / f"{layer + 1}", tree, base=tmp_path / f"{layer}")
        live = sum(index(tmp_path / f"{layer + 1}")["chunks"]["nbytes"])
        assert sum(file["nbytes"] - file["header"] for file in index(tmp_path / f"{layer + 1}")["files"]) <= 2 * live
    assert not numbers_of(tmp_path / "10") & numbers_of(tmp_path / "0")
    assert same(tr.load(tmp_path / "10"), tree)
    assert tr.verify(tmp_path / "10").ok


@pytest.mark.parametrize("number", [errno.EPERM, errno.EMLINK, errno.EXDEV])
def test_where_no_link_can_be_the_bytes_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    tr.save(tmp_path / "a", tree_of())

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    link = os.link
    monkeypatch.setattr(os, "link", lambda old, new, **at: refuse() if "data-" in str(new) else link(old, new, **at))
    tr.save(tmp_path / "b", tree_of(), base=tmp_path / "a")
    assert not numbers_of(tmp_path / "a") & numbers_of(tmp_path / "b")
    assert same(tr.load(tmp_path / "b"), tree_of())
    assert tr.verify(tmp_path / "b").ok


def test_a_base_whose_file_is_damaged_or_lost_is_not_shared(tmp_path: Path) -> None:
    tr.save(tmp_path / "a", tree_of())
    tr.save(tmp_path / "b", tree_of(), base=tmp_path / "a")
    (file,) = (tmp_path / "b").glob("data-*")
    file.chmod(0o644)
    content = file.read_bytes()
    file.write_bytes(content[:100] + b"x" + content[101:])  # its header
    tr.save(tmp_path / "c", tree_of(), base=tmp_path / "b")
    assert tr.verify(tmp_path / "c").ok
    file.unlink()
    tr.save(tmp_path / "d", tree_of(), base=tmp_path / "b")
    assert same(tr.load(tmp_path / "d"), tree_of())


def test_a_base_that_cannot_be_read_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tr.save(tmp_path / "a", tree_of())
    (file,) = (tmp_path / "a").glob("data-*")
    file.rename(tmp_path / "elsewhere")
    try:
        file.symlink_to(tmp_path / "elsewhere")
    except OSError:
        pytest.skip("no links here")
    tr.save(tmp_path / "b", tree_of(), base=tmp_path / "a")
    assert same(tr.load(tmp_path / "b"), tree_of())
    tr.save(tmp_path / "c", tree_of(), base=tmp_path / "b")

    read = LocalFile.read

    def refuse(file: LocalFile, offset: int, count: int) -> bytes:
        if Path(file.path).suffix == ".json":
            return read(file, offset, count)
        raise StoreError.of(OSError(errno.EIO, os.strerror(errno.EIO)), file.path, "read")

    with monkeypatch.context() as patch:
        patch.setattr(LocalFile, "read", refuse)
        tr.save(tmp_path / "d", tree_of(), base=tmp_path / "c")
    assert not numbers_of(tmp_path / "c") & numbers_of(tmp_path / "d")
    assert same(tr.load(tmp_path / "d"), tree_of())


@pytest.mark.skipif(os.name == "nt", reason="what is open is not removed there")
def test_a_base_whose_files_go_while_they_are_linked_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tree_of()
    tr.save(tmp_path / "a", tree)
    tree["layers"] = tree["layers"].copy()
    tree["layers"][4] += 1
    tr.save(tmp_path / "b", tree, base=tmp_path / "a")
    assert len(numbers_of(tmp_path / "b")) == 2
    link, linked = os.link, list[str]()

    def remove_before(old: Any, new: Any, **at: Any) -> None:
        if "data-" in str(new):
            linked.append(str(new))
            if len(linked) == 2:
                shutil.rmtree(tmp_path / "b")
        link(old, new, **at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", remove_before)
        tr.save(tmp_path / "c", tree, base=tmp_path / "b")
    assert len(linked) == 2
    assert tr.verify(tmp_path / "c").ok
    assert same(tr.load(tmp_path / "c"), tree)
    named = {file["name"] for file in index(tmp_path / "c")["files"]}
    assert {file.name for file in (tmp_path / "c").glob("data-*")} == named


def test_digests_beside_checksums_of_other_blocks_are_not_relied_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits.lower(monkeypatch, compared_box=16 << 20)
    tree = {"w": np.arange(60000.0), "v": np.ones(9)}
    tr.save(tmp_path / "a", {"other": np.ones(3)})
    with monkeypatch.context() as patch:
        patch.setattr("treering._format.safetensors.block_bytes", lambda _: 1 << 18)
        tr.save(tmp_path / "b", tree, base=tmp_path / "a")
    monkeypatch.setattr("treering._checkpoint.compare._INDEXES", [])
    tr.save(tmp_path / "c", tree, base=tmp_path / "b")
    assert tr.verify(tmp_path / "c").ok
    assert np.array_equal(tr.load(tmp_path / "c")["w"], tree["w"])


def test_a_save_waits_for_a_base_in_flight(tmp_path: Path) -> None:
    tree = {"w": np.arange(3e6)}
    tr.save_async(tmp_path / "a", tree)
    tr.save(tmp_path / "b", tree, base=tmp_path / "a")
    assert written(tmp_path / "b") == 0


def test_a_long_comparison_is_seen_to_go_on(tmp_path: Path) -> None:
    tr.save(tmp_path / "a", tree_of())
    plan, moved = plan_tree(tree_of(), ALONE), list[int]()

    class Counting(Watch):
        def move(self) -> None:
            moved.append(1)

    options = SaveOptions.of(
        tmp_path / "b", base=tmp_path / "a", metadata=None, overwrite=False, progress=None, timeout=None
    )
    save_folder.write_folder(plan, options, Counting())
    assert len(moved) > len(index(tmp_path / "b")["chunks"]["leaf"])


def test_the_header_of_a_shared_file_says_the_shapes_of_its_arrays(tmp_path: Path) -> None:
    tr.save(tmp_path / "a", {"w": np.zeros((4, 16), np.float32)})
    tr.save(tmp_path / "b", {"w": np.zeros(64, np.float32)}, base=tmp_path / "a")
    (file,) = (tmp_path / "b").glob("data-*")
    assert load_file(file)["w"].shape == (64,)


def test_a_changed_numpy_array_and_one_that_jax_sees_without_a_copy_are_found_by_their_bytes(tmp_path: Path) -> None:
    room = np.zeros(1024 + 64, np.uint8)
    start = -room.ctypes.data % 64
    memory = room[start : start + 1024].view(np.float32)
    tree: dict[str, Any] = {"numpy": np.zeros(300), "jax": jax.device_put(memory, may_alias=True)}
    tr.save(tmp_path / "a", tree)
    tr.save(tmp_path / "b", tree, base=tmp_path / "a")
    tree["numpy"][7] = memory[3] = 1.5
    tr.save(tmp_path / "c", tree, base=tmp_path / "b")
    found = tr.load(tmp_path / "c")
    assert found["numpy"].tobytes() == tree["numpy"].tobytes()
    assert np.asarray(found["jax"]).tobytes() == np.asarray(tree["jax"]).tobytes()
    assert not tr.load(tmp_path / "b")["numpy"].any()


def test_leaves_of_other_names_dtypes_and_shapes_are_other_leaves(tmp_path: Path) -> None:
    tr.save(tmp_path / "a", {"w": np.zeros((4, 100), "f4"), "v": np.ones(30), "gone": np.ones(500)})
    other = {"w": np.zeros((4, 100), "i4"), "u": np.ones(30), "v": np.ones((30, 1))}
    tr.save(tmp_path / "b", other, base=tmp_path / "a")
    found = tr.load(tmp_path / "b")
    assert {key: (leaf.dtype, leaf.shape) for key, leaf in found.items()} == {
        key: (leaf.dtype, leaf.shape) for key, leaf in other.items()
    }
    assert all(np.array_equal(found[key], other[key]) for key in other)


def test_a_checkpoint_can_be_its_own_base(tmp_path: Path) -> None:
    tree = tree_of()
    tr.save(tmp_path / "a", tree)
    before = numbers_of(tmp_path / "a")
    tree["bias"] = tree["bias"] + 1
    tr.save(tmp_path / "a", tree, base=tmp_path / "a", overwrite=True)
    assert before < numbers_of(tmp_path / "a")
    assert same(tr.load(tmp_path / "a"), tree)
    assert len(list((tmp_path / "a").glob("data-*"))) == 2


def test_in_the_background_the_base_may_be_in_flight(tmp_path: Path) -> None:
    trees = []
    tree = tree_of()
    for number in range(4):
        tree = tree | {"bias": tree["bias"] + 1}
        trees.append(tree)
        base = None if not number else tmp_path / f"{number - 1}"
        pending = tr.save_async(tmp_path / f"{number}", tree, base=base)
    pending.result()
    assert all(same(tr.load(tmp_path / f"{number}"), tree) for number, tree in enumerate(trees))
    assert written(tmp_path / "3") < 4096 + 256


def test_in_memory_the_server_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    url, tree = f"memory://increment/{os.urandom(4).hex()}", tree_of()
    tr.save(f"{url}/a", tree)
    client: Any = store_at(f"{url}/a").client  # type: ignore[attr-defined]
    asked: list[Any] = []
    perform = client.perform

    def note(request: Any) -> Any:
        asked.append(request)
        return perform(request)

    monkeypatch.setattr(client, "perform", note)
    changed = tree | {"bias": tree["bias"] + 1}
    tr.save(f"{url}/b", changed, base=f"{url}/a")
    sent = [len(request.data) for request in asked if type(request).__name__ == "Put" and "data-" in request.name]
    assert sent == [4096 + 56]
    assert [type(request).__name__ for request in asked].count("Copy") == 1
    store = store_at(f"{url}/a")
    store.remove(*store.names())
    assert tr.verify(f"{url}/b").ok
    assert same(tr.load(f"{url}/b"), changed)


def test_a_base_in_another_store_is_compared_and_everything_is_written(tmp_path: Path) -> None:
    url, tree = f"memory://increment/{os.urandom(4).hex()}", tree_of()
    tr.save(tmp_path / "a", tree)
    tr.save(f"{url}/b", tree, base=tmp_path / "a")
    tr.save(tmp_path / "c", tree, base=f"{url}/b")
    assert same(tr.load(tmp_path / "c"), tree)
    assert tr.verify(f"{url}/b").ok


def leaves_directory(path: Path) -> None:
    tree_serialize_leaves(os.fspath(path), {"w": np.ones(3)})


def single_file(path: Path) -> None:
    tr.save(path.with_suffix(".safetensors"), {"w": np.ones(3)})
    path.with_suffix(".safetensors").rename(path)


def run_of(path: Path) -> None:
    with tr.Run(path) as run:
        run.save(1, {"w": np.ones(3)})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (leaves_directory, r"of the form leaves, not a checkpoint"),
        (single_file, r"of the form safetensors, not"),
        (run_of, r"of the form run, not.*one step"),
    ],
)
def test_what_cannot_be_a_base_is_refused_by_name(tmp_path: Path, make: Callable[[Path], None], says: str) -> None:
    make(tmp_path / "base")
    with pytest.raises(UnsupportedError, match=says):
        tr.save(tmp_path / "a", {"w": np.ones(3)}, base=tmp_path / "base")
    assert not (tmp_path / "a").exists()


def test_single_files_share_nothing(tmp_path: Path) -> None:
    tr.save(tmp_path / "a", {"w": np.ones(3)})
    for name in ("b.safetensors", "b.msgpack"):
        with pytest.raises(UnsupportedError, match=r"single file.*without that suffix"):
            tr.save(tmp_path / name, {"w": np.ones(3)}, base=tmp_path / "a")
        with pytest.raises(UnsupportedError, match=r"base is .*single file.*save to a folder"):
            tr.save(tmp_path / "b", {"w": np.ones(3)}, base=tmp_path / name)
    with pytest.raises(NotFoundError, match=r"no files can be shared with base=.*not there"):
        tr.save(tmp_path / "b", {"w": np.ones(3)}, base=tmp_path / "not there")


def test_copies_and_conversions_of_a_checkpoint_that_shares_files(tmp_path: Path) -> None:
    tree = {"layers": tree_of()["layers"]}
    tr.save(tmp_path / "a", tree)
    tree["layers"] = tree["layers"].copy()
    tree["layers"][4] += 1
    tr.save(tmp_path / "b", tree, base=tmp_path / "a")
    here("cp", str(tmp_path / "b"), str(tmp_path / "copy"), code=0)
    assert tr.verify(tmp_path / "copy").ok
    assert np.array_equal(tr.load(tmp_path / "copy")["layers"], tree["layers"])
    tr.save(tmp_path / "c", tree, base=tmp_path / "copy")
    assert numbers_of(tmp_path / "c") == numbers_of(tmp_path / "copy")
    tr.convert(tmp_path / "b", tmp_path / "b.safetensors")
    assert np.array_equal(tr.load(tmp_path / "b.safetensors")["layers"], tree["layers"])


def test_a_plain_save_is_as_it_was(tmp_path: Path) -> None:
    tr.save(tmp_path / "a", tree_of())
    found = index(tmp_path / "a")
    assert found["treering"] == 1
    assert "digests" not in found
    assert found["chunks"]["box"] == [None] * len(found["chunks"]["box"])


# ---------------------------------------------------------------------------------------------------- several processes


def spread(seed: int = 0, layer: int | None = None) -> dict[str, Any]:
    """Leaves of every way to lie over processes; some of one layer are others."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    rows = np.arange(64 * 256, dtype=np.float32).reshape(64, 256) + seed
    if layer is not None:
        rows[layer] += 1
    return {
        "rows": jax.device_put(rows, NamedSharding(mesh, P("x"))),
        "everywhere": jax.device_put(rows + 1, NamedSharding(mesh, P())),
        "local": np.arange(500.0) + seed,
        "empty": jax.device_put(np.zeros((0, 8), np.float32), NamedSharding(mesh, P())),
        "step": seed,
    }


def equal(path: Path, tree: dict[str, Any]) -> bool:
    found = tr.load(path)
    return all(np.asarray(found[key]).tobytes() == np.asarray(leaf).tobytes() for key, leaf in tree.items())


def test_each_process_shares_its_own_boxes(together: Together, tmp_path: Path) -> None:
    trees = [spread(), spread(), spread(layer=37), spread(layer=37), spread(1)]
    for number, tree in enumerate(trees):
        wishes: dict[str, Any] = {"base": tmp_path / f"{number - 1}"} if number else {}
        trees_of = dict.fromkeys(range(together.count), tree).__getitem__
        outcomes = together.save(tmp_path / f"{number}", trees_of, **wishes)
        assert outcomes == [None] * together.count
    for number, tree in enumerate(trees):
        assert tr.verify(tmp_path / f"{number}").ok
        assert equal(tmp_path / f"{number}", tree)
    assert written(tmp_path / "1") == written(tmp_path / "3") == 0
    total = sum(index(tmp_path / "2")["chunks"]["nbytes"])
    new = sum(file.stat().st_size - 4096 for file in (tmp_path / "2").glob("data-*") if file.stat().st_nlink <= 2)
    assert new <= total // 8
    shutil.rmtree(tmp_path / "0")
    independent_reader.read(tmp_path / "1")


def test_another_number_of_processes_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two: Together) -> None:
    tree = spread()
    assert two.save(tmp_path / "a", lambda process: tree) == [None, None]
    assert two.save(tmp_path / "b", lambda process: tree, base=tmp_path / "a") == [None, None]
    tr.save(tmp_path / "alone", tree, base=tmp_path / "b")
    assert equal(tmp_path / "alone", tree)
    four = job_of(4, monkeypatch)
    assert four.save(tmp_path / "c", lambda process: tree, base=tmp_path / "alone") == [None] * 4
    assert tr.verify(tmp_path / "c").ok
    assert equal(tmp_path / "c", tree)


def test_joint_saves_in_the_background(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_by_threads(monkeypatch)
    job = job_of(2, monkeypatch)
    job.timing = PATIENT

    def save(path: Path, tree: Any, **wishes: Any) -> None:
        tr.save_async(path, tree, **wishes).result()

    tree = spread()
    assert job.save(tmp_path / "a", lambda process: tree, save=save) == [None, None]
    assert job.save(tmp_path / "b", lambda process: tree, base=tmp_path / "a", save=save) == [None, None]
    assert written(tmp_path / "b") == 0
    assert equal(tmp_path / "b", tree)


def test_all_processes_pass_a_base_or_none_does(two: Together, tmp_path: Path) -> None:
    tree = spread()
    two.save(tmp_path / "a", lambda process: tree)
    for which in (0, 1):
        outcomes = two.save(
            tmp_path / "b",
            lambda process: tree,
            wishes_of={which: {"base": tmp_path / "a"}, 1 - which: dict[str, Any]()}.__getitem__,
        )
        assert all(isinstance(outcome, MismatchError) for outcome in outcomes)
        assert "pass the same on all processes" in str(outcomes[1])
    assert not (tmp_path / "b").exists()


def test_a_process_that_finds_another_base_writes_its_part(two: Together, tmp_path: Path) -> None:
    tree = spread()
    two.save(tmp_path / "a", lambda process: tree)
    two.save(tmp_path / "b", lambda process: tree)
    outcomes = two.save(
        tmp_path / "c", lambda process: tree, wishes_of=lambda process: {"base": tmp_path / "ab"[process]}
    )
    assert outcomes == [None, None]
    assert equal(tmp_path / "c", tree)
    assert tr.verify(tmp_path / "c").ok


def test_what_a_process_hands_in_has_to_fit(two: Together, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = spread()
    two.save(tmp_path / "a", lambda process: tree)
    write = save_folder.write_changed

    def lie(part: Any, *given: Any) -> Any:
        written = write(part, *given)
        if part.share.process:
            object.__setattr__(part.share, "states", part.share.states[1:])
        return written

    monkeypatch.setattr("treering._checkpoint.save_folder.write_changed", lie)
    outcomes = two.save(tmp_path / "b", lambda process: tree, base=tmp_path / "a")
    assert "shares other boxes than planned" in str(outcomes[0])
    assert not (tmp_path / "b").exists()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("at", [0, 1 << 14, (1 << 18) - 1], ids=["first block", "second block", "last byte"])
def test_one_changed_number_of_a_large_leaf_is_written(tmp_path: Path, at: int) -> None:
    before = {"frozen": np.arange(1 << 18), "trained": np.arange(1 << 18)}
    after = {**before, "trained": before["trained"].copy()}
    after["trained"][at] += 1
    tr.save(tmp_path / "a", before)
    tr.save(tmp_path / "b", before, base=tmp_path / "a")  # digests are noted
    tr.save(tmp_path / "c", after, base=tmp_path / "b")
    assert equal(tmp_path / "c", after)
    assert equal(tmp_path / "b", before)
    assert tr.verify(tmp_path / "c").ok


def test_leaves_without_a_buffer_and_leaves_in_another_order_are_compared_too(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "bfloat16": jnp.arange(8, dtype="bfloat16"),
        "int4": np.arange(8).astype("int4"),
        "turned": np.arange(6.0).reshape(2, 3).T,
        "big": np.arange(4, dtype=">f4"),
        "plain": jnp.arange(4),
    }
    tr.save(tmp_path / "a", tree)
    for older, newer in ("ab", "bc"):
        tr.save(tmp_path / newer, tree, base=tmp_path / older)
        found = tr.load(tmp_path / newer)
        assert all(np.array_equal(found[key], leaf) for key, leaf in tree.items())  # ">f4" comes back as "<f4"
        assert not [file for file in (tmp_path / newer).glob("data-*") if file.stat().st_nlink == 1]
