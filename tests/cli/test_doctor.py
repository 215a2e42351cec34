"""treering doctor: what is committed, what is in flight, what is dead, and that looking changes nothing."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering as tr
from tests import faults
from tests.command import here, inside, treering
from treering import leaves
from treering._checkpoint.transaction import CheckpointFolder
from treering._coordination.message_board import PathMessageBoard
from treering._coordination.messages import DecisionMessage, Failure, PrepareMessage, VoteMessage, VoteStage
from treering._coordination.operations import Call, Get, Now, Put, Sleep
from treering._coordination.two_phase_commit import coordinate
from treering._inspect.doctor import diagnose
from treering._store.orphans import Locks, seen_locks
from treering._store.posix import descriptors
from treering._store.posix.store import entry_of
from treering._values.checkpoint_names import decision_name, heartbeat_name, journal_of, prepare_name, vote_name
from treering._values.processes import Processes
from treering.errors import StoreError

A, B, JOB = "0123456789abcdef", "fedcba9876543210", "00000000000000aa"
HERE = platform.node()
posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no links, pipes and flock for everybody")
sees_locks = pytest.mark.skipif(not Path("/proc/locks").exists(), reason="only Linux shows its locks")


def data_name(attempt: str, number: int = 0, count: int = 1) -> str:
    return f"data-{attempt}-{number:05}-of-{count:05}.safetensors"


def doctor(path: Path, code: int) -> dict[str, Any]:
    """What the verb says to programs."""
    answer: dict[str, Any] = json.loads(inside("doctor", str(path), "--json", code=code)[0])
    assert answer["ok"] is (code == 0)
    return answer


def text(path: Path, code: int) -> str:
    return inside("doctor", str(path), code=code)[0]


@pytest.fixture
def all_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no container hid anything: what holds no lock is dead."""

    def seen(folder: int | None) -> Locks:
        return Locks(None, seen_locks(folder).holders)

    monkeypatch.setattr("treering._store.orphans.seen_locks", seen)


@pytest.fixture
def on_nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system of many machines."""
    nothing = Locks("on nfs4 locks of other machines are not shown here", {})
    monkeypatch.setattr("treering._store.orphans.seen_locks", lambda _: nothing)


def dead(path: Path, attempt: str = A, nbytes: int = 5000) -> Path:
    """What a save left whose process was killed."""
    path.mkdir(exist_ok=True)
    (path / journal_of(attempt)).touch()
    (path / data_name(attempt)).write_bytes(bytes(nbytes))
    return path


def notes(
    path: Path, parts: Mapping[int, VoteMessage], *, attempt: str = A, who: str = "node0, pid 10", count: int = 4
) -> None:
    begin = PrepareMessage(number=7, attempt=attempt, signature=b"leaves", who=who, processes=count)
    (path / prepare_name(JOB)).write_bytes(begin.encode())
    for process, part in parts.items():
        (path / vote_name(attempt, process)).write_bytes(part.encode())


def snapshot(path: Path) -> dict[str, tuple[int, int, int]]:
    found = {}
    for place in [path, *path.rglob("*")]:
        status = place.lstat()
        found[str(place)] = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return found


# ------------------------------------------------------------------------------------------------------- what is whole


def test_what_is_whole_needs_nothing(tmp_path: Path) -> None:
    tr.save(tmp_path / "ckpt", {"w": np.arange(9.0)})
    leaves.tree_serialize_leaves(tmp_path / "dir", {"w": np.arange(9.0)}, prefix="model")
    for name, form in {"ckpt": "checkpoint", "dir": "leaves"}.items():
        found = doctor(tmp_path / name, 0)
        assert (found["schema"], found["problems"], found["attempts"]) == ("treering.doctor/1", [], [])
        committed = found["committed"]
        sizes = [place.stat().st_size for place in (tmp_path / name).rglob("*") if place.is_file()]
        kept = sum(place.stat().st_size for place in (tmp_path / name).rglob("record.json"))
        assert (committed["form"], committed["nbytes"]) == (form, sum(sizes) - kept)
        assert committed["processes"] == 1
        assert committed["at"].startswith("20")
    assert "checkpoint, saved 20" in text(tmp_path / "ckpt", 0)


def test_nothing_there(tmp_path: Path) -> None:
    assert doctor(tmp_path, 0)["notes"] == ["the folder is empty"]
    (tmp_path / ".treering").mkdir()
    assert doctor(tmp_path, 0)["notes"] == ["nothing was saved here"]


def test_what_cannot_be_looked_at_is_two(tmp_path: Path) -> None:
    tr.save(tmp_path / "ckpt", {"w": 1})
    assert "did you mean" in inside("doctor", str(tmp_path / "ckptt"), code=2)[1]
    assert "it holds 'ckpt'" in inside("doctor", str(tmp_path), code=2)[1]
    assert "is a file" in inside("doctor", str(tmp_path / "ckpt" / "treering.json"), code=2)[1]
    assert "URL" in inside("doctor", "hf://bucket/ckpt", code=2)[1]


def test_it_starts_without_jax_and_numpy(tmp_path: Path) -> None:
    tr.save(tmp_path / "ckpt", {"w": np.arange(9.0)})
    leaves.tree_serialize_leaves(tmp_path / "dir", {"w": np.arange(9.0)})
    program = (
        "import sys\nfrom treering.__main__ import main\n"
        "sys.argv.insert(1, 'doctor')\ntry:\n    main()\nexcept SystemExit:\n"
        "    print(sorted({'jax', 'numpy', 'ml_dtypes', 'tensorstore'} & set(sys.modules)))"
    )
    for name in ("ckpt", "dir"):
        done = subprocess.run([sys.executable, "-c", program, str(tmp_path / name)], capture_output=True, check=True)
        assert done.stdout.splitlines()[-1] == b"[]"


# ------------------------------------------------------------------------------------------------------ what is missing


def test_lost_and_short_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    tr.save(path, {"w": np.arange(9.0)})
    data = next(path.glob("data-*"))
    os.truncate(data, 4100)
    (problem,) = doctor(path, 1)["problems"]
    assert data.name in problem
    assert "has 4100 bytes instead of" in problem
    data.unlink()
    assert "is missing" in doctor(path, 1)["problems"][0]


def test_lost_and_short_leaves_are_named(tmp_path: Path) -> None:
    tree = {"w": np.arange(9.0), "b": {"c": np.arange(3.0)}}
    leaves.tree_serialize_leaves(tmp_path, tree)
    (tmp_path / "w" / "0").unlink()
    os.truncate(tmp_path / "b" / "c" / "0", 3)
    problems = doctor(tmp_path, 1)["problems"]
    assert sorted(problem.split(";")[0] for problem in problems) == [
        "b/c/0 has 3 bytes instead of 24",
        "w/0 is missing",
    ]


@pytest.mark.parametrize("form", ["checkpoint", "leaves"])
def test_a_damaged_index_is_a_problem(form: str, tmp_path: Path) -> None:
    tree = {"w": np.arange(9.0)}
    if form == "leaves":
        leaves.tree_serialize_leaves(tmp_path, tree)
    else:
        tr.save(tmp_path, tree)
    index = tmp_path / {"checkpoint": "treering.json", "leaves": "tensorstore_index.json"}[form]
    content = bytearray(index.read_bytes())
    content[len(content) // 2] ^= 1
    index.write_bytes(content)
    found = doctor(tmp_path, 1)
    assert "index" in found["problems"][0]
    if form == "checkpoint":
        # Nobody can tell whether it names the data: nothing may be called a leftover.
        assert [attempt["life"] for attempt in found["attempts"]] == ["over"]
        assert "keep them until" in found["attempts"][0]["advice"]


# ------------------------------------------------------------------------------------------------- in flight and dead


@posix
@sees_locks
def test_a_save_in_flight_is_known_by_its_lock(tmp_path: Path) -> None:
    tr.save(tmp_path / "ckpt", {"w": 1})
    with CheckpointFolder(tmp_path / "ckpt", overwrite=True, names_in=lambda _: []) as saving:
        saving.write_file(data_name(saving.attempt), [b"half"], 4)
        (attempt,) = doctor(tmp_path / "ckpt", 0)["attempts"]
        assert (attempt["attempt"], attempt["life"], attempt["nbytes"]) == (saving.attempt, "in flight", 4)
        assert attempt["reason"] == f"process {os.getpid()} of this machine holds its lock"
        assert "to do: wait" in text(tmp_path / "ckpt", 0)
    assert doctor(tmp_path / "ckpt", 0)["attempts"] == []


@posix
def test_no_lock_is_ever_asked_for_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that is taken for a moment, to see whether it is free, makes a saver fail in that moment."""
    tr.save(tmp_path / "ckpt", {"w": np.arange(9.0)})
    dead(tmp_path / "ckpt")
    notes(tmp_path / "ckpt", {0: VoteMessage(stage=VoteStage.PREPARED, who="node0, pid 10")})
    leaves.tree_serialize_leaves(tmp_path / "dir", {"w": np.arange(9.0)})
    leaves.tree_serialize_leaves(tmp_path / "dir", {"w": np.arange(9.0)}, write_index=False)
    before = {name: snapshot(tmp_path / name) for name in ("ckpt", "dir")}
    fcntl = descriptors.fcntl
    assert fcntl is not None

    refused = AssertionError("a lock was asked for")
    for name in ("flock", "lockf", "fcntl"):
        faults.fail(monkeypatch, fcntl, name, refused)
    for name in ("link", "mkdir", "remove", "rename", "replace", "rmdir", "unlink", "write"):
        faults.fail(monkeypatch, os, name, refused)
    for name in before:
        diagnose(tmp_path / name)
    monkeypatch.undo()
    assert {name: snapshot(tmp_path / name) for name in before} == before


@pytest.mark.usefixtures("all_seen")
def test_a_dead_save_holds_bytes_until_the_next_one(tmp_path: Path) -> None:
    found = doctor(dead(tmp_path / "ckpt"), 1)
    (attempt,) = found["attempts"]
    assert (attempt["life"], attempt["nbytes"], attempt["needs_attention"]) == ("dead", 5000, True)
    assert attempt["advice"] == "the next save removes it: nothing to do"
    assert found["notes"] == ["nothing is committed here"]
    said = text(tmp_path / "ckpt", 1)
    assert f"attempt {A}: dead" in said
    assert "2 files, 4.88 KiB, last changed" in said
    tr.save(tmp_path / "ckpt", {"w": 1})
    assert doctor(tmp_path / "ckpt", 0)["attempts"] == []


@pytest.mark.usefixtures("on_nfs")
def test_where_locks_of_others_are_hidden_nothing_is_called_dead(tmp_path: Path) -> None:
    (attempt,) = doctor(dead(tmp_path / "ckpt"), 1)["attempts"]
    assert attempt["life"] == "unknown"
    assert "on nfs4 locks of other machines" in attempt["reason"]


@posix
def test_a_killed_saver_is_dead_indeed(tmp_path: Path, all_seen: None) -> None:
    program = (
        "import sys, pathlib, signal, os\nfrom treering._checkpoint.transaction import CheckpointFolder\n"
        "saving = CheckpointFolder(pathlib.Path(sys.argv[1]), overwrite=False, names_in=lambda index: [])\n"
        "saving.__enter__()\nsaving.write_file(f'data-{saving.attempt}-00000-of-00001.safetensors', [b'x' * 9], 9)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "ckpt")], check=False)
    (attempt,) = doctor(tmp_path / "ckpt", 1)["attempts"]
    assert (attempt["life"], attempt["files"], attempt["nbytes"]) == ("dead", 2, 9)


@pytest.mark.usefixtures("all_seen")
def test_data_that_nothing_names_or_proves(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    tr.save(path, {"w": np.arange(9.0)})
    (path / data_name(A)).write_bytes(b"12345")
    (attempt,) = doctor(path, 1)["attempts"]
    assert "nothing proves that they are leftovers" in attempt["reason"]
    assert "yourself" in attempt["advice"]


@pytest.mark.usefixtures("all_seen")
def test_superseded_files_go_with_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ckpt"
    tr.save(path, {"w": np.arange(9.0)})
    old = next(path.glob("data-*"))
    kept = old.read_bytes()
    tr.save(path, {"w": np.arange(8.0)}, overwrite=True)
    old.write_bytes(kept)
    (attempt,) = doctor(path, 1)["attempts"]
    assert "superseded" in attempt["reason"]
    tr.save(path, {"w": np.arange(8.0)}, overwrite=True)
    assert doctor(path, 0)["attempts"] == []


@pytest.mark.usefixtures("all_seen")
def test_a_second_name_of_the_index_is_no_leftover(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    tr.save(path, {"w": np.arange(9.0)})
    os.link(path / "treering.json", path / journal_of(A))
    (attempt,) = doctor(path, 0)["attempts"]
    assert (attempt["life"], attempt["nbytes"]) == ("over", 0)
    shutil.copytree(path, tmp_path / "copy")  # the two names become two files
    own = json.loads((path / "treering.json").read_bytes())["attempt"]
    (tmp_path / "copy" / journal_of(A)).rename(tmp_path / "copy" / journal_of(own))
    (attempt,) = doctor(tmp_path / "copy", 0)["attempts"]
    assert (attempt["attempt"], attempt["life"]) == (own, "over")


@pytest.mark.usefixtures("all_seen")
def test_a_lock_file_is_a_problem_unless_somebody_saves(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    tr.save(path, {"w": 1})
    (path / ".treering.lock").touch()
    assert "remove it" in doctor(path, 1)["problems"][0]


# ---------------------------------------------------------------------------------------------------------- joint saves


@posix
@sees_locks
def test_a_joint_save_that_is_on(tmp_path: Path) -> None:
    """The very notes that process 0 puts, while it waits for the others."""
    call = Call(job=JOB, number=3, processes=Processes(this=0, count=3), timeout=60, doing="save 'x'")
    with CheckpointFolder(tmp_path / "x", overwrite=False, names_in=lambda _: [], attempt=call.attempt) as folder:
        steps = coordinate(call, b"signature")
        answer: Any = None
        while not isinstance(step := steps.send(answer), Sleep):
            answer = None
            if isinstance(step, Put):
                folder.board.put(step.name, step.data)
            elif isinstance(step, Get):
                answer = folder.board.get(step.name)
            elif isinstance(step, Now):
                answer = 0.0
            else:
                answer = b"checksums"
        (attempt,) = doctor(tmp_path / "x", 0)["attempts"]
        steps.close()
    assert (attempt["attempt"], attempt["life"], attempt["number"]) == (call.attempt, "in flight", 3)
    assert attempt["who"] == f"{HERE}, pid {os.getpid()}"
    assert [each["stage"] for each in attempt["processes"]] == ["written", "missing", "missing"]
    assert attempt["advice"].endswith("waited for: processes 1 and 2")


@pytest.mark.usefixtures("on_nfs")
def test_the_processes_of_a_joint_save_are_told_apart(tmp_path: Path) -> None:
    path = dead(tmp_path / "ckpt")
    notes(
        path,
        {
            0: VoteMessage(stage=VoteStage.PREPARED, who="node0, pid 10"),
            1: VoteMessage(stage=VoteStage.PREPARING, who="node1, pid 11"),
            2: VoteMessage(stage=VoteStage.FAILED, who="node2, pid 12", failure=Failure.of(OSError("no space left"))),
            3: VoteMessage(
                stage=VoteStage.FAILED, who="node3, pid 13", failure=Failure.of(StoreError("no space left"))
            ),
        },
        count=5,
    )
    (attempt,) = doctor(path, 1)["attempts"]
    assert (attempt["number"], attempt["who"], attempt["life"]) == (7, "node0, pid 10", "unknown")
    assert "another machine, node0, by process 10" in attempt["reason"]
    assert "processes 1 and 4 did not vote" in attempt["advice"]
    states = [(each["process"], each["stage"], each["who"]) for each in attempt["processes"]]
    assert states == [
        (0, "written", "node0, pid 10"),
        (1, "at work", "node1, pid 11"),
        (2, "failed", "node2, pid 12"),
        (3, "failed", "node3, pid 13"),
        (4, "missing", None),
    ]
    assert attempt["processes"][2]["problem"] == "OSError: no space left"
    assert attempt["processes"][3]["problem"] == "StoreError: no space left"
    said = text(path, 1)
    assert f"attempt {A}: unknown, save 7 of its job" in said
    assert "  process 2: failed   node2, pid 12" in said
    assert "  5 processes: 1 written, 1 at work, 2 failed, 1 missing\n" in said
    assert re.search(r"  process 4: missing, late for .*s\n", said)


@pytest.mark.usefixtures("on_nfs")
def test_a_large_job_in_flight_is_shown_with_its_tree(tmp_path: Path) -> None:
    path = dead(tmp_path / "ckpt")
    (own,) = {found[1] for entry in path.iterdir() if (found := re.match(r"data-([0-9a-f]{16})-", entry.name))}
    voted = {this: VoteMessage(stage=VoteStage.PREPARED, who=f"node{this}, pid 1") for this in range(40) if this != 35}
    notes(path, voted, attempt=own, count=40)
    (attempt,) = doctor(path, 1)["attempts"]
    late = attempt["processes"][35]
    assert (late["stage"], late["through"], late["nbytes"]) == ("missing", 1, None)
    assert 0 <= late["late"] < 3600
    assert [each["process"] for each in attempt["processes"] if each["through"] == 1] == list(range(33, 40))
    assert attempt["processes"][0]["nbytes"] > 0
    said = text(path, 1)
    assert "  40 processes: 39 written, 1 missing\n" in said
    assert re.search(r"  process 35: missing, late for .*s, votes through process 1\n", said)
    assert re.search(r"  process 0: .*, wrote [0-9.]+ ", said)


@pytest.mark.usefixtures("on_nfs")
def test_messages_that_lie_in_folders_are_found(tmp_path: Path) -> None:
    path = dead(tmp_path / "ckpt")
    notes(path, {}, count=600)
    board = PathMessageBoard(path)
    for this in range(600):
        board.put(vote_name(A, this), VoteMessage(stage=VoteStage.PREPARED, who=f"node{this}, pid 1").encode())
    board.remove_all([vote_name(A, 555)])
    (attempt,) = doctor(path, 1)["attempts"]
    missing = [each["process"] for each in attempt["processes"] if each["stage"] == "missing"]
    assert (missing, attempt["processes"][599]["who"]) == ([555], "node599, pid 1")


@pytest.mark.usefixtures("on_nfs")
@pytest.mark.skipif(sys.platform != "linux", reason="only there processes can be looked at")
def test_a_process_of_this_machine_lives_or_not(tmp_path: Path) -> None:
    path = dead(tmp_path / "ckpt")
    who = f"{HERE}, pid {os.getpid()}"
    notes(path, {0: VoteMessage(stage=VoteStage.PREPARED, who=who)}, who=who)
    (attempt,) = doctor(path, 0)["attempts"]
    assert attempt["life"] == "in flight"
    assert attempt["advice"].endswith("waited for: processes 1-3")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    notes(path, {}, who=f"{HERE}, pid {ended.pid}")
    assert doctor(path, 1)["attempts"][0]["life"] == "dead"


@pytest.mark.usefixtures("all_seen")
def test_notes_alone_need_nothing(tmp_path: Path) -> None:
    tr.save(tmp_path, {"w": 1})
    failed = DecisionMessage(who="node0, pid 10", failure=Failure.of(ValueError("no")), processes=(3,))
    (tmp_path / decision_name(A)).write_bytes(failed.encode())
    own = json.loads((tmp_path / "treering.json").read_bytes())["attempt"]
    (tmp_path / decision_name(own)).write_bytes(DecisionMessage(who="node0, pid 10").encode())
    attempts = {each["attempt"]: each for each in doctor(tmp_path, 0)["attempts"]}
    assert (attempts[A]["life"], attempts[A]["outcome"]) == ("over", "failed because of process 3: ValueError: no")
    assert attempts[A]["form"] == "notes"
    assert (attempts[own]["outcome"], attempts[own]["reason"]) == ("committed", "it is the committed one")


@posix
@sees_locks
def test_what_lies_beside_a_saver_is_its_own(tmp_path: Path) -> None:
    """Whether files that nothing proves are a running save's cannot be seen while a process holds the folder."""
    with CheckpointFolder(tmp_path, overwrite=False, names_in=lambda _: []):
        (tmp_path / data_name(A)).write_bytes(b"12345")
        notes(tmp_path, {}, attempt=B)
        found = {each["attempt"]: each for each in doctor(tmp_path, 0)["attempts"]}
    for attempt in (A, B):
        assert (found[attempt]["life"], found[attempt]["advice"].startswith("wait")) == ("in flight", True)
        assert f"process {os.getpid()} of this machine is saving to this folder" in found[attempt]["reason"]


@pytest.mark.usefixtures("on_nfs")
def test_messages_of_a_save_that_cannot_be_seen_say_who_to_ask(tmp_path: Path) -> None:
    tr.save(tmp_path, {"w": 1})
    notes(tmp_path, {})
    (attempt,) = doctor(tmp_path, 0)["attempts"]
    assert (attempt["form"], attempt["life"], attempt["files"]) == ("notes", "unknown", 0)
    assert "another machine, node0" in attempt["reason"]
    assert attempt["advice"].endswith("if not, the next save removes its messages")


def test_an_empty_folder_of_messages_is_ours(tmp_path: Path) -> None:
    (tmp_path / f".treering-{A}-messages-00001").mkdir()
    assert "nothing is committed here" in doctor(tmp_path, 0)["notes"]


def test_signs_of_life_are_told(tmp_path: Path) -> None:
    (tmp_path / heartbeat_name(3)).write_bytes(b"0123 1 waits to save\n")
    (tmp_path / heartbeat_name(4)).write_bytes(b"0123 1 waits to save\n")
    os.utime(tmp_path / heartbeat_name(4), (0, 0))
    told = doctor(tmp_path, 0)["notes"]
    assert "process 3 of a job is waiting for others" in told
    assert any(note.startswith("process 4 of a job waited for others") for note in told)


# ----------------------------------------------------------------------------------------------------- staged leaves


@pytest.mark.usefixtures("all_seen")
def test_saves_without_an_index_wait_for_one(tmp_path: Path) -> None:
    leaves.tree_serialize_leaves(tmp_path, {"w": np.arange(9.0)}, write_index=False)
    (attempt,) = doctor(tmp_path, 0)["attempts"]
    assert (attempt["form"], attempt["life"]) == ("leaves", "over")
    assert attempt["advice"] == "treering.leaves.index_leaves adds it to the index"
    leaves.index_leaves(tmp_path)
    assert doctor(tmp_path, 0)["attempts"] == []


@pytest.mark.usefixtures("all_seen")
def test_staged_files_of_the_dead_are_counted(tmp_path: Path) -> None:
    leaves.tree_serialize_leaves(tmp_path, {"w": np.arange(9.0)})
    staged = tmp_path / ".treering" / A / "leaves" / "w"
    staged.mkdir(parents=True)
    (staged / "0").write_bytes(bytes(700))
    (staged / "1").write_bytes(bytes(300))
    (attempt,) = doctor(tmp_path, 1)["attempts"]
    assert (attempt["attempt"], attempt["life"]) == (A, "dead")
    assert (attempt["files"], attempt["nbytes"]) == (2, 1000)
    leaves.tree_serialize_leaves(tmp_path, {"w": np.arange(9.0)})
    assert doctor(tmp_path, 0)["attempts"] == []


@pytest.mark.usefixtures("all_seen")
def test_a_commit_whose_moves_were_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr("treering._store.leaves_folder.staged_leaves.move_staged", killed)
        leaves.tree_serialize_leaves(tmp_path, {"w": np.arange(9.0)})
    found = doctor(tmp_path, 1)
    assert found["problems"] == []
    assert "not all of its files are moved to their key paths" in found["attempts"][0]["reason"]
    assert "moves the rest" in found["attempts"][0]["advice"]


@pytest.mark.usefixtures("all_seen")
def test_a_lost_index_of_leaves(tmp_path: Path) -> None:
    leaves.tree_serialize_leaves(tmp_path, {"w": np.arange(9.0)})
    (tmp_path / "tensorstore_index.json").unlink()
    (attempt,) = doctor(tmp_path, 1)["attempts"]
    assert "index_leaves rebuilds the index" in attempt["advice"]


# --------------------------------------------------------------------------------------------------------- hostile


@posix
def test_hostile_folders_end_well(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / vote_name(A, 1))
    (tmp_path / vote_name(A, 2)).symlink_to("/etc/passwd")
    (tmp_path / vote_name(A, 3)).mkdir()
    (tmp_path / vote_name(A, 4)).write_bytes(b"[" * 100_000)
    (tmp_path / vote_name(A, 5)).write_bytes(b'{"stage": "written", "who": 7, "left": false}')
    with (tmp_path / vote_name(A, 6)).open("wb") as large:
        large.truncate(1 << 40)
    who = "\x1b[2J\u202e" + "x" * 5000
    (tmp_path / vote_name(A, 7)).write_bytes(VoteMessage(stage=VoteStage.PREPARING, who=who).encode())
    (tmp_path / prepare_name(JOB)).write_bytes(
        PrepareMessage(number=1, attempt=A, signature=b"", who="node0, pid 10", processes=10**9).encode()
    )
    os.mkfifo(tmp_path / journal_of(B))
    (tmp_path / data_name(B)).symlink_to("/etc/passwd")
    (tmp_path / ".treering").symlink_to("/")
    started = time.monotonic()
    said = inside("doctor", str(tmp_path), code=1)[0]
    assert time.monotonic() - started < 20
    assert all(line.isprintable() and len(line) < 2000 for line in said.splitlines())
    stages = {each["process"]: each["stage"] for each in _of(doctor(tmp_path, 1), A)["processes"]}
    assert {stages[process] for process in range(1, 7)} == {"unreadable"}
    assert (stages[7], stages[8]) == ("at work", "missing")
    assert said.count("\n") < 100


def _of(found: dict[str, Any], attempt: str) -> dict[str, Any]:
    return next(each for each in found["attempts"] if each["attempt"] == attempt)


@posix
def test_hostile_indexes_end_well(tmp_path: Path) -> None:
    for name, make in {"fifo": os.mkfifo, "folder": os.mkdir}.items():
        (tmp_path / name).mkdir()
        make(tmp_path / name / "treering.json")
        assert inside("doctor", str(tmp_path / name), code=2)[1].startswith("error: ")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "treering.json").symlink_to("/etc/passwd")
    assert "is a link" in doctor(tmp_path / "link", 1)["problems"][0]


@posix
def test_a_link_to_a_data_file_is_no_reason_for_another_copy(tmp_path: Path) -> None:
    tr.save(tmp_path / "ckpt", {"w": np.ones(3)})
    (data,) = (tmp_path / "ckpt").glob("data-*")
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    (problem,) = doctor(tmp_path / "ckpt", 1)["problems"]
    assert "(cp -L)" in problem
    assert "use another copy" not in problem


@pytest.mark.usefixtures("all_seen")
def test_many_attempts_are_shown_in_short(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / data_name(f"{number:016x}")).write_bytes(b"12345")
    said = text(tmp_path, 1)
    assert said.splitlines()[-1] == "and 250 more attempts with 1.22 KiB"
    assert len(doctor(tmp_path, 1)["attempts"]) == 300


# ------------------------------------------------------------------------------------------------------- the locks


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "file"
    path.touch()
    descriptor = os.open(path, os.O_RDWR)
    assert descriptors.lock(descriptor)
    yield path
    os.close(descriptor)


@posix
@sees_locks
def test_a_lock_is_seen_and_its_end_too(locked: Path) -> None:
    folder = os.open(locked.parent, os.O_RDONLY)
    try:
        assert seen_locks(folder).holder(entry_of(locked.name, locked.stat())) == os.getpid()
        assert seen_locks(folder).holder(entry_of("", locked.parent.stat())) is None
    finally:
        os.close(folder)


class _Every:
    def __contains__(self, file_system: str) -> bool:
        return True


@sees_locks
def test_what_is_not_shown_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        monkeypatch.setattr("treering._store.orphans._OF_THIS_MACHINE", _Every())  # tests may run on any
        faults.answer(monkeypatch, os, "readlink", "pid:[4026532000]")
        assert seen_locks(folder).gap == "locks of other containers are not shown here"
        faults.answer(monkeypatch, os, "readlink", "pid:[4026531836]")
        assert seen_locks(folder).gap is None
        monkeypatch.setattr("treering._store.orphans._OF_THIS_MACHINE", ())
        assert "locks of other machines" in (seen_locks(folder).gap or "")
    finally:
        os.close(folder)


def test_folders_are_looked_at_without_a_system_that_shows_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treering._store.orphans.seen_locks", lambda _: seen_locks(None))
    assert "this system does not show its locks" in text(dead(tmp_path / "ckpt"), 1)


def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    tr.save(tmp_path / "ckpt", {"w": 1})
    assert "checkpoint, saved" in treering("doctor", str(tmp_path / "ckpt"), code=0).stdout


def test_the_versions_for_a_bug_report_need_no_path() -> None:
    shown = dict(line.split(maxsplit=1) for line in here("doctor", "--env", code=0).stdout.splitlines())
    assert shown["treering"] == tr.__version__
    assert shown["python"] == platform.python_version()
    assert shown["numpy"] == np.__version__
    assert shown["ml-dtypes"] == metadata.version("ml_dtypes")
