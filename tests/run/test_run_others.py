"""What a run does on the processes of a job that do not lead, seen from one; ``tests/multiprocess`` has real jobs."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

import treering as tr
from tests.command import here
from tests.jobs import be_process
from treering.errors import TimedOutError

TREE = {"w": np.arange(3.0)}


@pytest.fixture
def follower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tr.Run:
    """The run of process 1, which has saved: three steps are committed, of which process 0 has to remove two."""
    found = tr.Run(tmp_path / "run", keep=tr.KeepLast(1), timeout=30)
    found.save(1, TREE).result()
    with tr.Run(found.path) as run:
        for step in (2, 3):
            run.save(step, TREE)
    (found.path / "run.json").unlink()  # what process 0 spares is noted there
    be_process(monkeypatch, 1, 2)
    return found


@pytest.mark.parametrize("how", ["wait", "close", "with"])
def test_others_wait_until_process_0_has_removed_what_has_to_go(how: str, follower: tr.Run) -> None:
    begun = time.monotonic()
    removal = threading.Timer(0.3, here, ["gc", str(follower.path), "--keep-last", "1", "--yes"], {"code": 0})
    removal.start()
    if how == "with":
        with follower:
            pass
    else:
        getattr(follower, how)()
    assert follower.steps() == [3]
    assert time.monotonic() - begun >= 0.3
    removal.join()


def test_removals_that_do_not_come_are_a_timeout_that_names_process_0(follower: tr.Run) -> None:
    with pytest.raises(
        TimedOutError, match=r"process 0 has not removed steps 1 and 2 of '.*/run', which `keep` does not keep"
    ) as error:
        follower.wait(0.1)
    assert error.value.missing == (0,)
    with pytest.raises(KeyError), follower:  # an error that ends the block does not wait for them
        raise KeyError("mine")


def test_others_that_have_saved_nothing_wait_for_nothing(follower: tr.Run) -> None:
    idle = tr.Run(follower.path, keep=follower.keep, timeout=30)
    idle.wait(0.1)
    idle.close()
    assert idle.steps() == [1, 2, 3]


def test_process_0_waits_for_its_own_thread_alone(follower: tr.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    be_process(monkeypatch, 0, 2)
    follower.wait(0.1)
    assert follower.steps() == [1, 2, 3]
