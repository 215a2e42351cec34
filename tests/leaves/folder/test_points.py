"""Savers of leaves directories that die or meet errors at any of their calls: old or new, whole, and no litter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("kinds", "stride"), [("KILL_BEFORE", 37), ("EIO EIO_AFTER ENOSPC SHORT EMFILE", 89)])
def test_faults_here_and_there(tmp_path: Path, kinds: str, stride: int) -> None:
    command = [sys.executable, "-m", "tests.leaves.folder.points", str(stride), kinds]
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert len(found) == 12
    assert [wrong for report in found.values() for wrong in report["violations"]] == []
    assert all(report["points"] for report in found.values())
