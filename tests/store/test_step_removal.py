"""Steps that are removed: what goes, what stays, and removals that die or meet errors at any of their calls."""

import errno
import json
import os
from pathlib import Path

import pytest

from tests import faults, warm
from tests.folders import names, open_descriptors
from tests.on_disk import locked
from tests.store.checkpoints import (
    attempt_of,
    data_names,
    folder_at,
    load,
    names_in,
    remove,
    save,
    save_step,
    steps_of,
    tidy,
)
from tests.store.platforms import without_locks
from tests.store.removal_points import payload
from treering.errors import BusyError, CorruptError, StoreError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (10, 20):
        save_step(tmp_path / "run", step, payload(step))
    return tmp_path / "run"


def tombstone(folder: Path) -> Path:
    """Give the index the name that its removal gives it, and do no more of that."""
    index = folder / "treering.json"
    return index.rename(folder / f".treering.json.{attempt_of(index.read_bytes())}.removed")


NOTES = (".treering-0123456789abcdef-part-00001", ".treering-0123456789abcdef-verdict", ".treering-waiting-00001")
FAR = ".treering-0123456789abcdef-messages-00001"
"""The folder of messages of a large job."""


class TestNotesOfSavesByManyProcesses:
    """A process that stands still while a step is saved leaves notes there, and nobody saves to that step again."""

    @pytest.fixture(autouse=True)
    def noted(self, run: Path) -> None:
        for name in NOTES:
            (run / "step_00000020" / name).write_bytes(b"{}")
        (run / "step_00000020" / FAR).mkdir()
        (run / "step_00000020" / FAR / ".treering-0123456789abcdef-part-00300").write_bytes(b"{}")

    def test_they_go_with_the_step(self, run: Path) -> None:
        assert remove(run, 20)
        assert set(names(run)) == {"step_00000010"}

    def test_they_go_when_it_is_not_the_newest_any_more(self, run: Path) -> None:
        tidy(run, 20)
        assert set(names(run / "step_00000020")) >= {*NOTES, FAR}
        tidy(run, 20, newest=False)
        assert set(names(run / "step_00000020")).isdisjoint({*NOTES, FAR})
        assert load(run / "step_00000020") == payload(20)

    def test_where_nothing_is_saved_yet_they_stay(self, run: Path) -> None:
        """Processes may be meeting there for the first save of their job."""
        (run / "step_00000020" / "treering.json").unlink()
        tidy(run, 20, newest=False)
        assert set(names(run / "step_00000020")) >= {*NOTES, FAR}

    def test_an_empty_folder_of_them_goes_even_then(self, run: Path) -> None:
        for path in (run / "step_00000020").iterdir():
            if path.name != FAR:
                path.unlink()
        (*_, message) = (run / "step_00000020" / FAR).iterdir()
        tidy(run, 20)
        assert message.exists()
        message.unlink()
        tidy(run, 20)
        tidy(run, 20)
        assert set(names(run)) == {"step_00000010"}

    def test_while_somebody_saves_there_they_stay(self, run: Path) -> None:
        with locked(run / "step_00000020"), pytest.raises(BusyError):
            tidy(run, 20, newest=False)
        assert set(names(run / "step_00000020")) >= {*NOTES, FAR}


class TestRemoving:
    def test_a_step_goes_with_its_folder(self, run: Path) -> None:
        before = open_descriptors()
        assert remove(run, 20)
        assert set(names(run)) == {"step_00000010"}
        assert load(run / "step_00000010") == payload(10)
        assert not remove(run, 20)
        assert open_descriptors() == before

    def test_files_of_others_stay_and_keep_the_folder(self, run: Path) -> None:
        folder = run / "step_00000020"
        mine = {"config.json", "data-fedcba9876543210-00000-of-00001.safetensors", "model.safetensors"}
        for name in mine:
            (folder / name).write_bytes(b"mine")
        assert remove(run, 20)
        assert set(names(folder)) == mine
        assert steps_of(run) == [10]

    def test_names_that_no_data_file_has_stay(self, run: Path) -> None:
        """A hostile index lists what is not its own."""
        folder = run / "step_00000020"
        (folder / "config.json").write_bytes(b"mine")
        (run / "notes").write_bytes(b"mine")
        files, _ = json.loads((folder / "treering.json").read_bytes())
        hostile = [
            *files,
            "config.json",
            "../notes",
            "../step_00000010/treering.json",
            str(run / "notes"),
            "",
            ".",
            "..",
        ]
        (folder / "treering.json").write_text(json.dumps([hostile, []]))
        assert remove(run, 20)
        assert set(names(folder)) == {"config.json"}
        assert set(names(run)) == {"step_00000010", "step_00000020", "notes"}
        assert load(run / "step_00000010") == payload(10)

    def test_links_go_and_what_they_lead_to_stays(self, run: Path, tmp_path: Path) -> None:
        folder = run / "step_00000020"
        files, _ = json.loads((folder / "treering.json").read_bytes())
        (tmp_path / "precious").write_bytes(b"mine")
        (folder / files[0]).unlink()
        (folder / files[0]).symlink_to(tmp_path / "precious")
        assert remove(run, 20)
        assert not folder.exists()
        assert (tmp_path / "precious").read_bytes() == b"mine"

    def test_a_step_that_is_a_link_is_none(self, run: Path, tmp_path: Path) -> None:
        save(tmp_path / "elsewhere", b"mine")
        (run / "step_00000030").symlink_to(tmp_path / "elsewhere")
        assert not remove(run, 30)
        tidy(run)
        assert load(tmp_path / "elsewhere") == b"mine"

    @pytest.mark.parametrize("what", ["link", "pipe", "folder"])
    def test_an_index_that_is_no_file_is_refused(self, run: Path, tmp_path: Path, what: str) -> None:
        index = run / "step_00000020" / "treering.json"
        index.rename(tmp_path / "index")
        if what == "link":
            index.symlink_to(tmp_path / "index")
        elif what == "pipe":
            os.mkfifo(index)
        else:
            index.mkdir()
        with pytest.raises((StoreError, CorruptError, ValueError)):
            remove(run, 20)
        assert len(names(run / "step_00000020")) == 3
        assert (tmp_path / "index").exists()

    def test_a_damaged_index_removes_nothing(self, run: Path) -> None:
        folder = run / "step_00000020"
        (folder / "treering.json").write_bytes(b"{")

        def attempt_of_all(index: bytes) -> str:
            names_in(index)
            return attempt_of(index)

        before = set(names(folder))
        with pytest.raises(CorruptError):
            remove(run, 20, attempt_of_all)
        assert set(names(folder)) == before

    def test_a_step_that_should_stay_does(self, run: Path) -> None:
        assert not remove(run, 20, lambda index: None)
        assert load(run / "step_00000020") == payload(20)

    def test_while_somebody_saves_to_it_a_step_stays(self, run: Path) -> None:
        with folder_at(run / "step_00000020", overwrite=True), pytest.raises(BusyError, match="step_00000020"):
            remove(run, 20)
        assert load(run / "step_00000020") == payload(20)

    def test_a_reader_that_came_before_reads_on(self, run: Path) -> None:
        files, _ = json.loads((run / "step_00000020" / "treering.json").read_bytes())
        with (run / "step_00000020" / files[0]).open("rb") as data:
            remove(run, 20)
            assert data.read() == payload(20)[:30]

    def test_the_index_is_gone_for_good_before_the_first_file_goes(
        self, run: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        order: list[str] = []
        faults.before(monkeypatch, os, "replace", lambda name, new, **_: order.append(f"{name} is {new[-7:]}"))
        faults.before(monkeypatch, os, "unlink", lambda name, **_: order.append(name.rpartition(".")[2]))
        faults.before(monkeypatch, os, "fsync", lambda _: order.append("sync"))
        remove(run, 20)
        assert order[-6:] == ["treering.json is removed", "sync", "safetensors", "safetensors", "sync", "removed"]


class TestFinishing:
    def test_a_removal_that_was_cut_short_is_finished(self, run: Path) -> None:
        tombstone(run / "step_00000020")
        assert steps_of(run) == [10]
        tidy(run)
        assert set(names(run)) == {"step_00000010"}

    def test_a_save_into_the_step_finishes_it_too(self, run: Path) -> None:
        folder = run / "step_00000020"
        tombstone(folder)
        attempt = save(folder, b"new bytes")
        assert set(names(folder)) == {"treering.json", *data_names(attempt)}
        assert load(folder) == b"new bytes"

    def test_so_does_an_overwrite_of_what_was_put_back(self, run: Path, tmp_path: Path) -> None:
        folder = run / "step_00000020"
        removed = tombstone(folder)
        (folder / "treering.json").write_bytes(removed.read_bytes())
        attempt = save(folder, b"new bytes", overwrite=True)
        assert set(names(folder)) == {"treering.json", *data_names(attempt)}

    def test_what_the_index_lists_now_stays(self, run: Path) -> None:
        """A step that was put back from a copy, beside the tombstone of the same attempt; a second name even."""
        folder = run / "step_00000020"
        os.link(tombstone(folder), folder / "treering.json")
        tidy(run)
        assert load(folder) == payload(20)
        assert remove(run, 20)
        assert not folder.exists()

    def test_beside_a_damaged_index_nothing_goes(self, run: Path) -> None:
        folder = run / "step_00000020"
        tombstone(folder)
        (folder / "treering.json").write_bytes(b"{")
        before = set(names(folder))
        tidy(run)
        assert set(names(folder)) == before

    @pytest.mark.parametrize("content", [b"", b"{", b'["x"]'])
    def test_a_damaged_tombstone_proves_nothing(self, run: Path, content: bytes) -> None:
        folder = run / "step_00000020"
        tombstone(folder).write_bytes(content)
        before = set(names(folder))
        tidy(run)
        assert set(names(folder)) == before

    def test_a_tombstone_that_is_a_link_or_a_pipe_is_not_read(self, run: Path, tmp_path: Path) -> None:
        folder = run / "step_00000020"
        index = folder / "treering.json"
        (folder / ".treering.json.0000000000000000.removed").symlink_to(index)
        os.mkfifo(folder / ".treering.json.0000000000000001.removed")
        before = set(names(folder))
        tidy(run)
        assert load(folder) == payload(20)
        assert set(names(folder)) == before

    def test_what_a_dead_save_left_is_swept(self, run: Path) -> None:
        left = run / "step_00000030"
        left.mkdir()
        (left / f".treering.json.{'a' * 16}.treering-tmp").write_bytes(b"")
        for name in data_names("a" * 16):
            (left / name).write_bytes(b"half")
        tidy(run)
        assert set(names(run)) == {"step_00000010", "step_00000020"}

    def test_what_a_living_save_writes_is_not(self, run: Path) -> None:
        with folder_at(run / "step_00000030") as saving:
            saving.write_file(data_names(saving.attempt)[0], [b"half"], 4)
            with pytest.raises(BusyError):
                tidy(run)
            assert len(names(run / "step_00000030")) == 2

    def test_an_empty_folder_goes_though_it_is_locked(self, run: Path) -> None:
        """A saver that has just made it begins again; it would be told that it is busy, were the lock taken."""
        (run / "step_00000030").mkdir()
        with locked(run / "step_00000030"):
            tidy(run)
        assert not (run / "step_00000030").exists()

    def test_a_sound_step_is_not_locked(self, run: Path) -> None:
        with folder_at(run / "step_00000020", overwrite=True) as saving:
            journal = run / "step_00000020" / f".treering.json.{saving.attempt}.treering-tmp"
            journal.rename(run / "aside")
            tidy(run, 20)
            (run / "aside").rename(journal)


def test_without_locks_of_folders_a_file_is_the_lock(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_locks(monkeypatch)
    tombstone(run / "step_00000010")
    (run / "step_00000010" / ".treering.lock").write_bytes(b"")
    with pytest.raises(BusyError):
        tidy(run)
    (run / "step_00000010" / ".treering.lock").unlink()
    tidy(run)
    assert remove(run, 20)
    assert set(names(run)) == set()


def test_an_error_says_which_step_it_was(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        faults.fail(patch, os, "unlink", errno.EACCES, when=lambda name, **options: name.endswith(".safetensors"))
        with pytest.raises(StoreError, match=r"step_00000020.*Permission denied"):
            remove(run, 20)
    assert steps_of(run) == [10]
    tidy(run)
    assert set(names(run)) == {"step_00000010"}


@pytest.mark.parametrize(
    ("kinds", "stride"),
    [
        ("KILL_BEFORE", 8),
        ("EIO EIO_AFTER ENOSPC EMFILE SHORT", 23),
        pytest.param("KILL_BEFORE EIO EIO_AFTER ENOSPC EMFILE SHORT", 3, marks=pytest.mark.slow),
    ],
)
def test_faults_here_and_there(tmp_path: Path, kinds: str, stride: int) -> None:
    done = warm.run("-m", "tests.store.removal_points", str(stride), kinds, environment={"TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 8
    assert [wrong for scene in found for wrong in scene[2]] == []
    assert all(points for _, points, _ in found)
