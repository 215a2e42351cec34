"""A slice of the killer: real system calls where strace is there, and random times."""

import shutil

import pytest

from tests import faults
from tests.crash.attacks import attack
from torture import traced


@pytest.mark.slow
def test_one_scene_is_killed_everywhere() -> None:
    done = attack("kill", "--rounds", "5", "--seed", "1", "--scene", "checkpoint, overwrite")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "random times (seed 1): 5 kill" in done.stdout
    if traced.missing_reason() is None:
        assert "signal=KILL" in done.stdout
        assert done.stdout.count("  0 violations") == 3
    else:
        assert "every system call: not done" in done.stdout


def test_without_strace_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    faults.answer(monkeypatch, shutil, "which", None)
    assert traced.missing_reason() == "strace is not installed"
