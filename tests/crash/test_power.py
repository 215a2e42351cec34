"""A slice of the power cuts, and proof that they would show a save that is not durable."""

import json
from pathlib import Path

import pytest

from tests import faults, warm
from tests.crash.attacks import attack
from torture import images

# One step of a commit is left out, in the process that saves; then one scene is cut.
BROKEN = """
import json, sys, warnings
warnings.simplefilter("ignore", RuntimeWarning)
from torture import power
from torture.broken import break_promise

break_promise(sys.argv[1])
reports = []
power._told = lambda report: reports.append(report) or len(report.violations)
code = power.power(int(sys.argv[3]), 0, 1, 0, [sys.argv[2]])
print(json.dumps({"code": code, "outcomes": reports[0].outcomes}))
"""

reason = images.missing_reason()


@pytest.mark.slow
def test_a_slice_of_the_power_cuts() -> None:
    done = attack("power", "--cuts", "2", "--moments", "3", "--peers", "0", "--scene", "checkpoint, overwrite")
    assert done.returncode == 0, done.stdout + done.stderr
    if reason is None:
        assert "2 acknowledged saves there" in done.stdout
        assert "  0 violations" in done.stdout
    else:
        assert f"power cuts: not done, {reason}" in done.stdout


@pytest.mark.parametrize(
    ("scene", "broken"),
    [
        ("checkpoint, overwrite", "no last fsync"),
        ("checkpoint, overwrite", "no fsync of data"),
        ("leaves, overwrite", "nothing"),
        ("leaves, overwrite", "no syncfs"),
    ],
)
def test_a_step_that_is_left_out_is_noticed(scene: str, broken: str) -> None:
    """A save that leaves nothing out survives each cut, and one that leaves a step out loses one of six at least.

    Not each of them: the kernel may write at any moment what nobody asked it to, when another process of the machine
    calls sync or when memory is short. On a busy machine it did so for every second cut.
    """
    if reason is not None:
        pytest.skip(f"no power can be cut here: {reason}")
    cuts = 2 if broken == "nothing" else 6
    path = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    done = warm.run("-c", BROKEN, broken, scene, str(cuts), environment=path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert sum(found["outcomes"].values()) == cuts, done.stdout
    if broken == "nothing":
        assert found == {"code": 0, "outcomes": {"acknowledged saves there": cuts}}, done.stdout
    else:
        assert (found["code"], found["outcomes"].get("acknowledged saves LOST", 0) > 0) == (1, True), done.stdout


def test_where_nothing_can_be_mounted_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    faults.answer(monkeypatch, images.os, "geteuid", 1)  # type: ignore[attr-defined]
    assert images.missing_reason() == "only root may mount"
    faults.answer(monkeypatch, images.os, "geteuid", 0)  # type: ignore[attr-defined]
    faults.answer(monkeypatch, images.shutil, "which", None)  # type: ignore[attr-defined]
    assert images.missing_reason() == "mkfs.ext4 is not installed"
