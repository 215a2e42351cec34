"""A conversion of a run that is killed at calls of the system: the next one goes on where it was."""

import json
import os
import subprocess
import sys

import pytest

from tests.crash.attacks import ROOT


@pytest.mark.slow
def test_a_conversion_goes_on_wherever_it_was_killed() -> None:
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "OPENBLAS_NUM_THREADS": "1",  # children are forked from a process with one thread
        "PYTHONWARNINGS": "ignore::RuntimeWarning",  # jax dislikes every fork; no device has been started here
    }
    command = [sys.executable, "-m", "torture.converted_runs", "5"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["violations"] == []
    assert found["kills"] >= 20
