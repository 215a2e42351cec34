"""Every fault at every call of a save, in forked children: old or new, never less."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FILES = ("first, in new folders", "overwrite through a link", "overwrite after a crash", "overwrite, large, direct")
CHECKPOINTS = (
    "checkpoint, first, in new folders",
    "checkpoint, overwrite after a crash",
    "checkpoint, first, no hard links",
)
LEAVES = ("leaves, first, file by file", "leaves, overwrite beside others", "leaves, indexed later")
SCENES = (*FILES, *CHECKPOINTS, *LEAVES)


def start(*scenes: str, stride: int = 1) -> subprocess.Popen[str]:
    # What dies here is a process, not the machine: a file system in memory shows the same, and is faster.
    memory = Path("/dev/shm")
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "OPENBLAS_NUM_THREADS": "1",  # children are forked from a process with one thread
        "PYTHONWARNINGS": "ignore::RuntimeWarning",  # jax dislikes every fork; no device has been started here
        "TMPDIR": str(memory if memory.is_dir() else Path("/tmp")),
    }
    command = [sys.executable, "-m", "torture.points", str(stride), *scenes]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the sweeps of all scenes found, made by three processes at once."""
    results: dict[str, Any] = {}
    # A save into a leaves directory makes hundreds of calls, most of them alike.
    for process in [start(*FILES), start(*CHECKPOINTS), start(*LEAVES, stride=11)]:
        with process:
            output, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        results |= json.loads(output)
    return results


@pytest.mark.parametrize("scene", SCENES)
def test_no_fault_at_any_call_loses_anything(found: dict[str, Any], scene: str) -> None:
    report = found[scene]
    assert report["violations"] == []
    # The net was cast: every kind of fault struck, at as many calls as a save makes at least.
    kinds = {"killed before", "EIO", "done, but EIO", "ENOSPC", "EMFILE", "half of it moved"}
    assert set(report["points"]) >= kinds - ({"half of it moved"} if scene in LEAVES else set())
    assert report["points"]["killed before"] >= (10 if scene in LEAVES else 20)
    assert set(report["outcomes"]) == {"acknowledged", "error", "killed"}
    if "direct" in scene:
        assert report["points"]["half of it moved"] >= 9
