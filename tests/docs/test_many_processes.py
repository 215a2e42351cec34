"""The program on the page about many processes runs as it stands there, launched as it says there, and is resumed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import treering as tr
from tests.command import inside
from torture.ports import free_port

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "many-processes.md").read_text(encoding="utf-8")
FENCES = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
PROGRAM = next(text for kind, text in FENCES if kind == "python" and "jax.distributed.initialize(" in text)
LAUNCH = next(text for kind, text in FENCES if kind == "text" and text.startswith("for number in 0 1"))


def launched(command: str, folder: Path, timeout: float = 120) -> list[str]:
    """Run lines of a shell as on the page, with a free port; return what the processes said."""
    port = free_port()
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    shell = subprocess.Popen(
        ["bash", "-c", command.replace(":8476", f":{port}").replace("python ", f"{sys.executable} ")],
        cwd=folder,
        env=inherited | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = shell.communicate(timeout=timeout)
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.communicate()
    # Both write to one pipe; where Python does not buffer, a line and its end come one by one.
    said = sorted(re.findall(r"process \d+: .*?(?=process \d+: |$)", out, re.MULTILINE))
    assert said, err
    return said


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt" or shutil.which("bash") is None, reason="the page shows lines for a shell")
def test_the_program_runs_and_resumes_with_another_number_of_processes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    said = launched(LAUNCH, tmp_path)
    assert said == [
        "process 0: nothing is saved there, a new run begins",
        "process 0: step 3 is saved",
        "process 1: nothing is saved there, a new run begins",
        "process 1: step 3 is saved",
    ]
    shown = inside("inspect", str(tmp_path / "run"), code=0)[0]
    # As on the page, but for sizes, times and names of files.
    assert re.search(r"split: process 0: \d+ KiB in 1 file; process 1: \d+ KiB in 1 file", shown)
    assert "4 x 1 over processes 0 and 1" in shown
    assert "by 2 processes" in inside("doctor", str(tmp_path / "run"), code=0)[0]
    assert [place.name for place in (tmp_path / "run").iterdir() if place.name.startswith(".")] == []

    alone = "JAX_NUM_CPU_DEVICES=2 python train.py 127.0.0.1:8476 1 0 run"
    assert launched(alone, tmp_path) == ["process 0: step 6 is saved"]
    state = tr.load(tmp_path / "run")
    assert state["step"] == 6
    assert jnp.array_equal(state["params"]["w"], jnp.full((1024, 256), 0.5**6))
