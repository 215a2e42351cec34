"""treering's annotations arrive at its users: py.typed is there, and mypy sees the types that the docs name."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_a_users_program_type_checks(tmp_path: Path) -> None:
    # No settings but strict, and a cache of its own, away from the project's.
    program = Path(__file__).with_name("public_api.py")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={tmp_path}", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
