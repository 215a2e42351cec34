"""Those who join a save of process 0: files of its attempt with the rights of the old index, nothing else touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.folders import names, open_descriptors
from tests.on_disk import decision_name, heartbeat_name, prepare_name, vote_name
from tests.store.checkpoints import folder_at, join, journal_name, refuse, save, write
from treering.errors import BusyError, NotFoundError, StoreError

ATTEMPT = "0123456789abcdef"
OTHER = "fedcba9876543210"
FIRST = f"data-{ATTEMPT}-00000-of-00002.safetensors"
SECOND = f"data-{ATTEMPT}-00001-of-00002.safetensors"


def test_two_write_one_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    before = open_descriptors()
    with folder_at(path, attempt=ATTEMPT) as leader, join(path, ATTEMPT) as joined:
        assert leader.attempt == ATTEMPT
        joined.require_space(4)
        joined.write_file(SECOND, [b"ring"], 4)
        joined.make_durable()
        leader.write_file(FIRST, [b"tree"], 4)
        leader.commit(b"[[],[]]")
    assert names(path) == [FIRST, SECOND, "treering.json"]
    assert open_descriptors() == before


def test_new_files_take_the_rights_of_the_old_index(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    save(path, b"old content")
    (path / "treering.json").chmod(0o604)
    with folder_at(path, overwrite=True, attempt=ATTEMPT) as leader, join(path, ATTEMPT) as joined:
        joined.write_file(SECOND, [b"ring"], 4)
        assert (path / SECOND).stat().st_mode & 0o777 == 0o604
        leader.commit(b"[[],[]]")


def test_only_names_of_the_attempt_are_written(tmp_path: Path) -> None:
    with join(tmp_path, ATTEMPT) as joined:
        for name in ("treering.json", f"data-{OTHER}-00001-of-00002.safetensors", "../x"):
            with pytest.raises(ValueError, match="not a data file of attempt"):
                joined.write_file(name, [b""], 0)
    assert names(tmp_path) == []


def test_who_aborts_removes_only_its_own(tmp_path: Path) -> None:
    (tmp_path / FIRST).write_bytes(b"of process 0")
    with join(tmp_path, ATTEMPT) as joined:
        joined.write_file(SECOND, [b"ring"], 4)
        joined.abort()
        joined.abort()
        assert names(tmp_path) == [FIRST]


def test_no_file_is_written_twice(tmp_path: Path) -> None:
    (tmp_path / SECOND).write_bytes(b"of somebody")
    with join(tmp_path, ATTEMPT) as joined:
        with pytest.raises(StoreError):
            joined.write_file(SECOND, [b"ring"], 4)
        joined.abort()
    assert (tmp_path / SECOND).read_bytes() == b"of somebody"


def test_a_folder_that_is_gone_is_an_error_of_ours(tmp_path: Path) -> None:
    with join(tmp_path / "none", ATTEMPT) as joined:
        for deed in (lambda: joined.require_space(1), joined.make_durable):
            with pytest.raises(NotFoundError):
                deed()
        joined.abort()
    assert names(tmp_path) == []


# ------------------------------------------------------------------------------------------------------ after a failure


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_journal_stays_while_others_may_have_files(overwrite: bool, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    if overwrite:
        save(path, b"old content")
    before = names(path) if overwrite else []
    with folder_at(path, overwrite=overwrite, attempt=ATTEMPT) as leader:
        leader.write_file(FIRST, [b"tree"], 4)
        (path / SECOND).write_bytes(b"of process 1")
    assert names(path) == sorted([*before, journal_name(ATTEMPT), SECOND])
    attempt = save(path, b"new content", overwrite=overwrite)
    assert names(path) == [*(f"data-{attempt}-{n:05}-of-00002.safetensors" for n in range(2)), "treering.json"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_nothing_stays_when_the_others_are_done(overwrite: bool, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    if overwrite:
        save(path, b"old content")
    before = names(path) if overwrite else []
    with folder_at(path, overwrite=overwrite, attempt=ATTEMPT) as leader:
        leader.write_file(FIRST, [b"tree"], 4)
        (path / SECOND).write_bytes(b"of process 1, who could not remove it")
        leader.others_are_done()
    assert (names(path) if path.exists() else []) == before


def test_a_living_attempt_is_spared(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    with folder_at(path, attempt=ATTEMPT) as leader:
        leader.board.put(prepare_name(OTHER), b"begin")
        with pytest.raises(BusyError), folder_at(path):
            pass
        assert leader.board.get(prepare_name(OTHER)) == b"begin"
        leader.commit(b"[[],[]]")


@pytest.mark.parametrize("overwrite", [False, True])
def test_notes_of_the_dead_are_swept_and_the_own_are_not(overwrite: bool, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    path.mkdir()
    if overwrite:
        save(path, b"old content")
    dead = [prepare_name(OTHER), vote_name(OTHER, 3), decision_name(OTHER), heartbeat_name(2)]
    for name in [*dead, vote_name(ATTEMPT, 1), f"{vote_name(OTHER, 1)}.{OTHER}.new"]:
        (path / name).write_bytes(b"{}")
    with folder_at(path, overwrite=overwrite, attempt=ATTEMPT) as leader:
        assert [name for name in names(path) if name.startswith(".treering-")] == [vote_name(ATTEMPT, 1)]
        leader.commit(write(leader, b"payload"))
    save(path, b"again", overwrite=True)
    assert not [name for name in names(path) if name.startswith(".")]


def test_files_of_others_beside_notes_are_refused_as_ever(tmp_path: Path) -> None:
    (tmp_path / vote_name(OTHER, 3)).write_bytes(b"{}")
    (tmp_path / "precious").write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="precious"), folder_at(tmp_path, attempt=ATTEMPT):
        pass
    assert names(tmp_path) == [vote_name(OTHER, 3), "precious"]


# -------------------------------------------------------------------------------------------------------- being refused


def test_who_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ckpt"
    with refuse(path) as board:
        assert path.is_dir()
        board.put(decision_name(ATTEMPT), b"refused")
        board.remove_all([decision_name(ATTEMPT)])
    assert names(tmp_path) == []


def test_who_is_refused_leaves_a_folder_that_was_there(tmp_path: Path) -> None:
    with refuse(tmp_path):
        pass
    assert tmp_path.is_dir()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError), refuse(tmp_path / "file"):
        pass


@pytest.mark.skipif(os.name == "nt", reason="no links")
def test_a_link_to_the_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with join(tmp_path / "link", ATTEMPT) as joined:
        joined.write_file(SECOND, [b"ring"], 4)
    assert names(tmp_path / "real") == [SECOND]
