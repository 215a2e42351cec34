"""The room of those who join a save into a leaves directory, and process 0's side of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests import faults
from tests.clocks import wait_at_most
from tests.leaves.folder import directories
from tests.leaves.folder.directories import (
    array_text,
    everything,
    expected,
    files,
    join,
    load,
    open_leaves,
    save,
    stage,
    update_for,
)
from tests.store.platforms import without_syncfs
from tests.stores import begin_leaves
from treering._store.api import Version
from treering._store.objects.memory import MemoryStore
from treering._store.pieces import Buffer
from treering._store.unmoved_leaves import JoinedAttempt
from treering.errors import ExistsError, NotFoundError, StoreError

ATTEMPT = "0123456789abcdef"
OLD = {"layer/w": b"0123456789", "b": b"abcd"}
NEW = {"layer/w": b"abcdefgh"}


def staged(path: Path) -> Path:
    return path / ".treering" / ATTEMPT / "leaves"


def commit(leader: directories.Staging) -> None:
    """Commit ``NEW``, of which the leader has written the ``.zarray`` and another one the chunks."""
    leader.write("layer/w", files((".zarray", array_text(ATTEMPT, NEW["layer/w"]))))
    leader.make_durable()
    leader.commit(b"{}", update_for({"": (ATTEMPT, {"layer/w": ["0", "1"]})}))


def write(joined: directories.Joined) -> None:
    joined.write("layer/w", [("0", [b"ab", b"cd"], 4)])
    joined.write("layer/w", files(("1", b"efgh")))


@pytest.mark.parametrize("whole", [True, False])
def test_two_write_one_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    if not whole:
        without_syncfs(monkeypatch)
    save(tmp_path, OLD)
    with stage(tmp_path, ATTEMPT) as leader:
        assert leader.attempt == ATTEMPT
        with join(tmp_path, ATTEMPT) as joined:
            write(joined)
            joined.make_durable()
        assert load(tmp_path) == OLD
        commit(leader)
    assert load(tmp_path) == NEW
    assert everything(tmp_path) == expected({"": NEW})


def test_every_written_file_and_folder_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one call for all: those of this process, and no others."""
    synced: list[int] = []
    without_syncfs(monkeypatch)
    faults.before(monkeypatch, os, "fsync", lambda number: synced.append(os.fstat(number).st_ino))
    with stage(tmp_path, ATTEMPT) as leader, join(tmp_path, ATTEMPT) as joined:
        leader.write("other", files((".zarray", b"{}")))
        write(joined)
        synced.clear()
        joined.make_durable()
        ways = [".", ".treering", f".treering/{ATTEMPT}", f".treering/{ATTEMPT}/leaves"]
        below = ["layer", "layer/w", "layer/w/0", "layer/w/1"]
        names = [*ways, *(f"{ways[-1]}/{name}" for name in below)]
        assert sorted(synced) == sorted((tmp_path / name).stat().st_ino for name in names)


def test_places_of_what_others_write_are_looked_at(tmp_path: Path) -> None:
    save(tmp_path, OLD, prefix="other")
    (tmp_path / "layer" / "w" / "1").unlink()
    with stage(tmp_path, ATTEMPT) as leader, join(tmp_path, ATTEMPT) as joined:
        leader.write("c", files((".zarray", array_text(ATTEMPT, b"abcd"))))
        leader.make_durable()
        (tmp_path / "c").mkdir()
        (tmp_path / "c" / "0").write_bytes(b"mine")
        joined.write("c", files(("0", b"abcd")))
        with pytest.raises(ExistsError, match=r"c.0"):
            leader.commit(b"{}", update_for({"": (ATTEMPT, {"c": ["0"]})}))
    assert (tmp_path / "c" / "0").read_bytes() == b"mine"


def test_rolling_back_removes_what_this_process_wrote(tmp_path: Path) -> None:
    with stage(tmp_path, ATTEMPT) as leader, join(tmp_path, ATTEMPT) as joined:
        leader.write("layer/w", files((".zarray", b"{}")))
        write(joined)
        joined.roll_back()
        leader.roll_back()
        assert sorted(entry.name for entry in (staged(tmp_path) / "layer" / "w").iterdir()) == [".zarray"]
        joined.roll_back()
    assert everything(tmp_path) == []


def test_rolling_back_after_everything_was_removed(tmp_path: Path) -> None:
    with stage(tmp_path, ATTEMPT) as leader, join(tmp_path, ATTEMPT) as joined:
        write(joined)
        leader.roll_back()
        leader.close()
        joined.roll_back()
        with pytest.raises(StoreError, match="was removed while it was written"):
            joined.make_durable()
    assert not staged(tmp_path).exists()


def test_a_save_that_is_not_rolled_back_is_left_to_the_next_one(tmp_path: Path) -> None:
    """It has no lock and no record, others may go on writing, and the next saver sweeps it."""
    save(tmp_path, OLD)
    leader = stage(tmp_path, ATTEMPT)
    with join(tmp_path, ATTEMPT) as joined:
        write(joined)
        leader.write("layer/w", files((".zarray", array_text(ATTEMPT, NEW["layer/w"]))))
        leader.make_durable()
        with pytest.raises(ZeroDivisionError):
            leader.commit(b"{}", lambda *_: 1 / 0)  # type: ignore[arg-type]
        leader.close()
        joined.write("late", files(("0", b"abcd")))
        assert staged(tmp_path).exists()
        assert not (staged(tmp_path).parent / "record.json").exists()
        assert load(tmp_path) == OLD
    save(tmp_path, NEW)
    assert everything(tmp_path) == expected({"": NEW})


def test_closing_what_was_committed_changes_nothing(tmp_path: Path) -> None:
    leader = stage(tmp_path, ATTEMPT)
    with join(tmp_path, ATTEMPT) as joined:
        write(joined)
    commit(leader)
    leader.close()
    assert load(tmp_path) == NEW
    assert everything(tmp_path, records=True) == sorted([*expected({"": NEW}), f".treering/{ATTEMPT}/record.json"])


def test_the_folder_may_come_later_than_the_note(tmp_path: Path) -> None:
    """As on a network file system: whoever joins waits a while for it."""
    (tmp_path / ".treering").mkdir()
    found: list[str] = []

    def take_part() -> None:
        with join(tmp_path, ATTEMPT) as joined:
            found.append(joined.attempt)

    thread = threading.Thread(target=take_part)
    thread.start()
    with stage(tmp_path, ATTEMPT):
        thread.join()
    assert found == [ATTEMPT]


def test_no_folder_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_at_most(monkeypatch, staged_folder=0.05)
    with pytest.raises(StoreError, match="process 0 gave up or died"):
        join(tmp_path, ATTEMPT)
    with pytest.raises(FileNotFoundError):
        join(tmp_path / "none", ATTEMPT)


def test_notes_of_the_dead_are_swept_and_those_of_the_living_stay(tmp_path: Path) -> None:
    dead, alive, own = "1" * 16, "2" * 16, ATTEMPT
    kept = [f".treering-{alive}-part-00001", f".treering-{own}-verdict"]
    mine = [".treering-notes", "data", ".treering-waiting"]
    gone = [f".treering-{dead}-part-00001", f".treering-{dead}-verdict", ".treering-waiting-00004"]
    for name in (*kept, *mine, *gone):
        (tmp_path / name).write_bytes(b"{}")
    with begin_leaves(tmp_path, alive) as other:
        (tmp_path / gone[0]).write_bytes(b"{}")
        (tmp_path / kept[0]).write_bytes(b"{}")
        (tmp_path / kept[1]).write_bytes(b"{}")
        with begin_leaves(tmp_path, own) as leader:
            assert set(kept) <= {entry.name for entry in tmp_path.iterdir()}
            assert leader.store.find(kept[1]) is not None
            leader.roll_back()
        other.roll_back()
    assert {entry.name for entry in tmp_path.iterdir()} == {*kept, *mine}


def test_notes_are_not_what_a_folder_holds(tmp_path: Path) -> None:
    (tmp_path / ".treering-waiting-00001").write_bytes(b"{}")
    with open_leaves(tmp_path) as directory, pytest.raises(NotFoundError, match="it is empty"):
        directory.read_index()
    (tmp_path / "data").write_bytes(b"")
    with open_leaves(tmp_path) as directory, pytest.raises(NotFoundError, match="it holds 'data'"):
        directory.read_index()


def test_a_note_that_is_a_folder_or_a_link_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / ".treering-waiting-00001").mkdir()
    (tmp_path / ".treering-waiting-00002").symlink_to("elsewhere")
    begin_leaves(tmp_path).close()
    assert (tmp_path / ".treering-waiting-00001").is_dir()
    assert (tmp_path / ".treering-waiting-00002").is_symlink()


def test_what_is_on_its_way_to_a_bucket_is_rolled_back_too() -> None:
    gate = threading.Event()

    class SlowStore(MemoryStore):
        def create(self, name: str, buffers: Iterable[Buffer], size: int, *, like: Version | None = None) -> None:
            assert gate.wait(30)
            super().create(name, buffers, size, like=like)

    store = SlowStore()
    with JoinedAttempt(store, Path("a"), ATTEMPT) as joined:
        joined.write("w", [("0.0", [b"tree"], 4)])
        threading.Timer(0.1, gate.set).start()
        joined.roll_back()
    assert list(store.list()) == []
