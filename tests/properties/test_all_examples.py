"""The properties with all their examples: the default run draws a third of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "tests").rglob("test_*.py")
    if "@quick(" in path.read_text(encoding="utf-8") and path != Path(__file__)
)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_all_examples(file: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-m",
            "hypothesis and not slow",
            file,
        ],
        cwd=ROOT,
        env=environment | {"TREERING_ALL_EXAMPLES": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
