"""Processes of a job that make different joint calls: all are told who called what, and the job goes on."""

from __future__ import annotations

from pathlib import Path

from tests.multiprocess.different_calls import makes_different_calls
from tests.multiprocess.jobs import results, run_job


def test_calls_that_differ_are_told_to_all_and_end_no_later_one(tmp_path: Path) -> None:
    every = results(run_job(makes_different_calls, 2, devices=1, arguments=[str(tmp_path)], timeout=120))
    latest, remove = "look for the latest step of 'run'", "remove steps of 'run'"
    wanted = {
        "save, load": ("save 'step_00000001'", latest),
        "gc, load": (remove, latest),
        "load 1, load 2": ("load 'step_00000001'", "load 'step_00000002'"),
        "init, gc": (latest, remove),
        "delete, branch": ("remove step 4 of 'run'", "branch from step 4 of 'run'"),
        "leaves, load": ("load 'leaves'", latest),
    }
    for number, found in enumerate(every):
        for step, (name, (apart, *after)) in enumerate(found.items(), 1):
            assert [one.get("result") for one in after] == [step, step, min(step, 2), step], (number, name, after)
            zero, one = wanted[name]
            assert apart["error"] == "MismatchError", (number, name, apart)
            assert f"process 0 came to {zero}, process 1 came to {one}; all" in apart["message"], (number, apart)
