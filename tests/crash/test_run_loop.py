"""A slice of the attacks on runs: a loop that is killed, saves whose errors come late; and proof that they see."""

import os
import re
import subprocess
import sys

import pytest

from tests.crash.attacks import ROOT, attack
from torture.run_failures import HEARINGS
from torture.run_ledger import Ledger, Rules

RULES = Rules(last=1, every=10, best=1, loss=lambda step: abs(step - 5))


def broken(what: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run an attack while one promise of a run is broken."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torture.broken", what, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [("--kills", "2"), ("--kills", "2", "--incremental"), ("--kills", "1", "--incremental", "--bucket")],
    ids=["whole", "incremental", "in a bucket"],
)
def test_a_loop_that_is_killed_loses_nothing(more: tuple[str, ...]) -> None:
    done = attack("run", "--seed", "7", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "  0 violations" in done.stdout
    assert " 0 saves acknowledged" not in done.stdout
    assert ("shared files found" in done.stdout) == ("--incremental" in more)
    assert ", 0 shared files" not in done.stdout


@pytest.mark.slow
def test_an_error_in_the_background_is_heard() -> None:
    done = attack("background", "--scene", "background, overwrite", "--scene", "run, next step", "--stride", "61")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  0 violations") == len(HEARINGS)
    assert len(re.findall(r" error(, [0-9]+ killed)?\n", done.stdout)) == len(HEARINGS)


@pytest.mark.slow
def test_a_loop_that_goes_back_dies_on_one_branch_or_on_the_other() -> None:
    arguments = ("background", "--scene", "run, another branch", "--heard", "result", "--stride", "13")
    done = attack(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "  0 violations" in done.stdout
    assert re.search(r", [1-9][0-9] killed\n", done.stdout), done.stdout
    done = broken("later steps go one by one", *arguments)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "which is of the old branch, steps [2] are of the new one" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "arguments", "seen"),
    [
        ("it says so before it is saved", ("run", "--kills", "6", "--seed", "3"), "saves acknowledged; after"),
        ("nothing is ever swept", ("run", "--kills", "4", "--seed", "3"), "has step"),
        (
            "late errors are swallowed",
            ("background", "--scene", "background, overwrite", "--heard", "the next call", "--stride", "11"),
            "nobody was told, and it is not there",
        ),
    ],
)
def test_a_broken_promise_is_noticed(what: str, arguments: tuple[str, ...], seen: str) -> None:
    done = broken(what, *arguments)
    assert done.returncode == 1, done.stdout + done.stderr
    assert seen in done.stdout


def wrong(told: list[str], before: dict[int, int], found: dict[int, int]) -> list[str]:
    return Ledger.of(told).wrong(before, found, RULES)


def test_the_ledger_knows_what_may_be_there() -> None:
    assert wrong(["begun 6", "save 5 1 1"], {5: 0, 6: 0, 7: 0}, {5: 1}) == []
    assert wrong(["begun 6", "save 5 1 1"], {5: 0, 6: 0, 7: 0}, {5: 1, 6: 0}) != []
    told = ["begun 6", "save 6 0 0", "acknowledged 6", "save 7 0 0"]
    assert wrong(told, {5: 0}, {5: 0, 6: 0}) == []
    assert wrong(told, {5: 0}, {5: 0, 6: 0, 7: 0}) == []
    assert wrong(told, {5: 0}, {5: 0, 7: 0}) == []
    assert wrong([*told, "acknowledged 7"], {5: 0}, {5: 0, 7: 0}) == []


@pytest.mark.parametrize(
    ("told", "found", "seen"),
    [
        (["save 6 0 0", "acknowledged 6"], {5: 0}, "lacks step 6"),
        (["save 6 0 0", "acknowledged 6"], {6: 0}, "lacks step 5"),
        (["save 6 0 0", "acknowledged 6"], {4: 0, 5: 0, 6: 0}, "has step 4"),
        (["save 6 0 0"], {5: 0, 6: 0, 7: 0}, "has step 7"),
        (["save 6 0 0", "save 7 0 0", "acknowledged 6", "acknowledged 7"], {5: 0, 6: 0, 7: 0}, "has step 6"),
        (["save 5 1 1", "acknowledged 5"], {5: 0}, "step 5 is of branch 0"),
        (["save 4 1 1", "acknowledged 4"], {4: 1, 5: 0}, "has step 5"),
    ],
)
def test_the_ledger_knows_what_is_wrong(told: list[str], found: dict[int, int], seen: str) -> None:
    (problem,) = wrong(told, {5: 0}, found)
    assert seen in problem


def test_what_is_acknowledged_out_of_order_is_noticed() -> None:
    with pytest.raises(ValueError, match="out of order"):
        Ledger.of(["save 1 0 0", "save 2 0 0", "acknowledged 2"])
