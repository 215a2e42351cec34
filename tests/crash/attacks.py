"""Running the attacks as a person does."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def attack(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m torture`` and return what it said."""
    command = [sys.executable, "-m", "torture", *arguments]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
