"""A slice of the attacks on processes of a job, and proof that they would show a protocol that is broken."""

import os
import subprocess
import sys

import pytest

from tests.crash.attacks import ROOT, attack
from torture.process_jobs import names

pytestmark = pytest.mark.slow

SLICE = ("--count", "2", "--layer", "forged", "--deadline", "1", "--at-once", "8")


def test_a_slice_of_the_attacks_on_processes() -> None:
    scenes = ("--scene", "save checkpoint, overwrite", "--scene", "save leaves, first")
    asked = ("--point", "its part is not put yet", "--action", "kill", "--action", "pause")
    done = attack("processes", *SLICE, *scenes, *asked)
    assert done.returncode == 0, done.stdout + done.stderr
    # Two kinds of save, each of two processes, killed and paused.
    assert "8 cases" in done.stdout
    assert "  0 violations" in done.stdout
    assert done.stdout.count("old state, TimedOutError") == 8


@pytest.mark.parametrize(
    ("broken", "point", "action", "seen"),
    [
        ("process 0 says so before it commits", "all parts are there", "kill", "process 1 says that it is saved"),
        ("others swallow the verdict", "its part is not put yet", "pause", "process 1 says that it is saved"),
        ("others leave their files", "it has no file yet", "outlive", "the next save of a new job: left"),
        ("a point has moved", "the index is replaced", "kill", "process 0 of 2 never came to 'the index is replaced'"),
    ],
)
def test_a_broken_rule_is_noticed(broken: str, point: str, action: str, seen: str) -> None:
    asked = ("--scene", "save checkpoint, overwrite", "--point", point, "--action", action)
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "torture.broken", broken, "processes", *SLICE, *asked],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert seen in done.stdout


def test_numbers_of_processes_are_found_in_messages() -> None:
    assert names("no sign of processes 2, 4-6 and 9 (host, pid 7)") == (2, 4, 5, 6, 9)
    assert names("process 1 (vm, pid 28900) has not said") == (1,)
    assert names("the processes did not synchronise") == ()
