"""Several processes at one checkpoint: one wins, nobody harms it, readers see whole ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("locks", "rounds"),
    [
        ("locks", 12),
        pytest.param("locks", 50, marks=pytest.mark.slow),
        pytest.param("no locks", 50, marks=pytest.mark.slow),
    ],
)
def test_savers_and_readers_at_once(tmp_path: Path, locks: str, rounds: int) -> None:
    command = [sys.executable, "-m", "tests.store.racing", str(tmp_path), str(rounds), locks]
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert found["mixed"] == []
    assert found["whole"] > 0
    # The net was cast: they met.
    assert {"won", "BusyError", "gave up"} <= set(found["outcomes"]) <= {"won", "BusyError", "gave up", "ExistsError"}
