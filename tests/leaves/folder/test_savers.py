"""Several savers at one leaves directory: none loses another one's branch, readers see whole ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("rounds", [5, pytest.param(15, marks=pytest.mark.slow)])
def test_savers_and_readers_at_once(tmp_path: Path, rounds: int) -> None:
    command = [sys.executable, "-m", "tests.leaves.folder.racing", str(tmp_path), str(rounds)]
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == {"processes": ["done"] * 3, "threads": ["done"] * 3, "reading": ["done"], "wrong": []}
