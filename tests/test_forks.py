"""A process that is forked while another thread makes its first call of treering can make its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no forks")

# Each moment has a process of its own, in which nothing was imported yet.
PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
import treering as tr

folder, tree, moments = sys.argv[1], {"w": np.arange(10.0)}, sys.argv[2:]


def first_call(moment):
    thread = threading.Thread(target=tr.save, args=(f"{folder}/{moment}", tree))
    thread.start()
    while moment not in sys.modules:
        time.sleep(0.001)
    child = os.fork()
    if not child:
        signal.alarm(60)
        tr.save(f"{folder}/{moment}-child", tree)
        assert (tr.load(f"{folder}/{moment}-child")["w"] == tree["w"]).all()
        os._exit(0)
    thread.join()
    assert os.waitpid(child, 0)[1] == 0, moment
    tr.load(f"{folder}/{moment}")
    os._exit(0)


for moment in moments:
    process = os.fork()
    if not process:
        try:
            first_call(moment)
        finally:
            os._exit(1)
    print(moment, os.waitpid(process, 0)[1])
"""
MOMENTS = ("treering.checkpoint", "treering._checkpoint.save", "jax", "jax._src.core", "treering._plan.save")


def test_a_fork_in_the_first_call_of_another_thread_makes_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path), *MOMENTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.stdout.splitlines() == [f"{moment} 0" for moment in MOMENTS], done.stderr
