"""Programs that end while a save is in flight: it is there, or they say that it is not, and end."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering
from tests.crash.attacks import ROOT
from tests.crash.ends import SIZES

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no forks")

# A way of ending, and the status.
WELL = {
    "falls off": 0,
    "exception": 1,
    "sys.exit": 0,
    "sys.exit(3)": 3,
    "exit handler": 0,
    "exit handler, before the first save": 0,
    "exit handler, after the first save": 0,
    "thread": 0,
    "thread, at the end": 0,
    "forked child": 0,
    "spawned child": 0,
    "two": 0,
    "garbage": 0,
    "terminated": 0,
}
FAILS = "the save to '{path}' failed, and its error was never raised: RuntimeError: a progress that fails"
STANDS = "the save to '{path}' is not done, and was abandoned: it makes no more progress"
TERMINATED = "the save to '{path}' is not done, and was abandoned: SystemExit was raised twice during the wait for it"
# A way of ending, the status, and the lines on stderr.
BADLY: dict[str, tuple[int, Sequence[str]]] = {
    "told": (0, []),
    "cancelled": (0, []),
    "fails": (1, [FAILS]),
    "fails, sys.exit(3)": (1, [FAILS]),
    "fails, then an exit handler": (1, [FAILS]),
    "forked child that fails": (1, [FAILS]),
    "stands": (1, [STANDS]),
    "stands, and one waits": (1, [STANDS.replace("{path}", "{path} first"), STANDS]),
    "terminated twice": (1, [TERMINATED]),
    "no stderr": (1, []),
}


def ended(folder: Path, ways: Sequence[str], sizes: Sequence[str], count: int = 1) -> list[dict[str, Any]]:
    """Return how the programs of some ways and sizes have ended."""
    arguments = ["-m", "tests.crash.ends", str(folder), ";".join(ways), ";".join(sizes), str(count)]
    command = [sys.executable, "-W", "ignore", *arguments]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    told: list[dict[str, Any]] = json.loads(done.stdout)
    assert len(told) == len(ways) * len(sizes) * count
    return told


def require_saved(told: dict[str, Any]) -> None:
    assert told["status"] == WELL[told["way"]], told
    said = told["err"].splitlines()
    assert said[-1:] == (["ValueError: the program has failed"] if told["way"] == "exception" else []), told
    assert "treering:" not in told["err"]
    found = treering.load(told["path"])
    assert found["step"] == 7
    np.testing.assert_array_equal(found["numpy"], np.arange(SIZES[told["size"]]))
    np.testing.assert_array_equal(found.get("jax", np.arange(1000)), np.arange(1000))


def test_programs_that_end_have_saved_or_tell_what_is_lost(tmp_path: Path) -> None:
    well = ["falls off", "exit handler", "forked child"]
    badly = ["told", "fails, then an exit handler", "stands"]
    for told in ended(tmp_path, [*well, *badly], ["small"]):
        (require_saved if told["way"] in well else require_lost)(told)


@pytest.mark.slow
def test_programs_that_end_have_saved_what_takes_long(tmp_path: Path) -> None:
    for told in ended(tmp_path, ["falls off", "sys.exit"], ["large"]):
        require_saved(told)


def require_lost(told: dict[str, Any]) -> None:
    status, lines = BADLY[told["way"]]
    assert told["status"] == status, told
    assert told["err"].splitlines() == [f"treering: {line.format(path=told['path'])}" for line in lines], told
    assert not Path(told["path"], "treering.json").exists()
    assert told["out"] == ("the exit handler of the program\n" if "then an exit handler" in told["way"] else "")


# Which way it is makes no difference to how long the writing takes: the large tree goes all of them once.
ENDS = ["falls off", "exception", "sys.exit"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "ways", "count"),
    [
        ("small", list(WELL)[::2], 3),
        ("small", list(WELL)[1::2], 3),
        ("large", ENDS, 3),
        ("large", [way for way in WELL if way not in ENDS], 1),
    ],
)
def test_three_of_three(tmp_path: Path, size: str, ways: Sequence[str], count: int) -> None:
    for told in ended(tmp_path, ways, [size], count):
        require_saved(told)


@pytest.mark.slow
def test_what_is_lost_is_told(tmp_path: Path) -> None:
    for told in ended(tmp_path, [*BADLY, "fails in an exit handler"], ["small"]):
        if told["way"] in BADLY:
            require_lost(told)
        else:
            assert told["err"].splitlines()[-1] == "RuntimeError: a progress that fails"
