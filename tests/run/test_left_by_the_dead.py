"""What a process that is killed leaves in the folder of a run goes once it is old, and nothing of one that lives."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import treering as tr
from tests import faults
from tests.buckets import install
from tests.command import inside
from tests.on_disk import LEFT_DOCUMENT, step_path
from tests.stores import located, names_at, put_messages, write_file
from tests.warm import Programs

_HOLDS = """
import os, sys
os.link = lambda *_, **__: os.kill(os.getpid(), 9)
import treering
treering.Run(sys.argv[1]).hold(1)
"""
_WAITS = """
import os, sys
from tests.stores import wait_for_others
wait_for_others(sys.argv[1], lambda: os.kill(os.getpid(), 9))
"""
_WAITING = ".treering-waiting-0000{}"
_UNNAMED = f"{LEFT_DOCUMENT}.0123456789abcdef.new"


def fill(path: str, *steps: int) -> tr.Run:
    with tr.Run(path) as run:
        for step in steps:
            run.save(step, {"step": step}).result(60)
    return run


def killed_in(programs: Programs, program: str, path: Path) -> str:
    """Let a process be killed, and return the name of the file that it leaves in the run's folder."""
    before = set(names_at(str(path)))
    done = programs.run("-c", program, str(path))
    assert done.returncode == -9, done.stderr
    (left,) = set(names_at(str(path))) - before
    return left


def be_old(path: Path, *names: str, seconds: float = 3600.0) -> None:
    for name in names:
        changed = (path / name).stat().st_mtime - seconds
        os.utime(path / name, (changed, changed))


SWEEPERS: dict[str, Callable[[str], object]] = {
    "save": lambda path: fill(path, max(tr.Run(path).steps()) + 1),
    "gc": lambda path: tr.Run(path).gc(dry_run=False),
    "gc --yes": lambda path: inside("gc", path, "--yes", code=0),
}


@pytest.mark.skipif(os.name == "nt", reason="there is no SIGKILL")
@pytest.mark.parametrize("program", [_HOLDS, _WAITS], ids=["begins to hold", "waits for others"])
def test_what_the_killed_leave_is_shown_and_goes_once_it_is_old(
    programs: Programs, tmp_path: Path, program: str
) -> None:
    path = tmp_path / "run"
    fill(str(path), 1)
    for name, sweep in SWEEPERS.items():
        left = killed_in(programs, program, path)
        sweep(str(path))
        assert left in names_at(str(path)), name  # its process might live
        be_old(path, left)
        told, _ = inside("doctor", str(path), code=0)
        assert "was killed" in told, told
        assert "a later save removes it" in told, told
        sweep(str(path))
        assert left not in names_at(str(path)), name
        assert "was killed" not in inside("doctor", str(path), code=0)[0]
    assert tr.Run(path).load(1) == {"step": 1}


def test_what_is_not_old_or_not_treerings_stays(tmp_path: Path) -> None:
    path = tmp_path / "run"
    fill(str(path), 1)
    young, old = _WAITING.format(3), _WAITING.format(4) + ".0123456789abcdef.new"
    others = (".treering-notes", f"{LEFT_DOCUMENT}.new", "notes.0123456789abcdef.new")
    for name in (young, old, _UNNAMED, *others):
        write_file(path / name, b"")
    be_old(path, old, _UNNAMED, *others)
    (path / _WAITING.format(5)).mkdir()
    be_old(path, _WAITING.format(5))
    fill(str(path), 2)
    assert set(names_at(str(path))) == {
        "run.json", step_path(path, 1).name, step_path(path, 2).name, young, *others, _WAITING.format(5),
    }  # fmt: skip


def test_in_a_bucket_too(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = install(monkeypatch)
    path = "memory://bucket/run"
    fill(path, 1)
    put_messages(located(path), _WAITING.format(3))
    fill(path, 2)
    assert _WAITING.format(3) in names_at(path)
    bucket.wait(3600.0)
    fill(path, 3)
    assert _WAITING.format(3) not in names_at(path)
    assert tr.Run(path).steps() == [1, 2, 3]


def test_whoever_was_taken_for_dead_begins_to_hold_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stood still before it gave its document a name, for so long that the document was swept."""
    path = tmp_path / "run"
    fill(str(path), 1)
    swept: list[str] = []

    def sweep(source: str, *_: object, **__: object) -> None:
        if not swept:
            swept.append(source)
            be_old(path, source)
            tr.Run(path).gc(dry_run=False)

    faults.before(monkeypatch, os, "link", sweep)
    with tr.Run(path).hold(1) as lease:
        lease.renew()
        assert swept[0] not in names_at(str(path))
        with pytest.raises(tr.errors.BusyError, match="held by"):
            tr.Run(path).delete(1)
