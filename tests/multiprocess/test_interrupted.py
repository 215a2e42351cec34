"""An interrupt, or a wrong argument, before a joint save is counted: the others hear of it, and the next save works."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocess.interrupted import interrupts_any_line, interrupts_before_counting, interrupts_the_first_save
from tests.multiprocess.jobs import Crews, results, run_job


@pytest.mark.parametrize("victim", [0, 1])
def test_what_ends_a_save_before_it_is_counted_ends_no_later_one(tmp_path: Path, crews: Crews, victim: int) -> None:
    arguments = [str(tmp_path), victim]
    every = results(crews.run(interrupts_before_counting, 2, devices=1, arguments=arguments, timeout=150))
    for number, found in enumerate(every):
        for name in ("argument", "argument of a run"):
            first, second = found.pop(name)
            # Of a step that is no number, no process knows where it would have been saved.
            wanted = "TimedOutError" if number != victim and name == "argument of a run" else "UnsupportedError"
            assert first["error"] == wanted, (number, name, first)
            assert "error" not in second, (number, name, second)
            if number != victim and name == "argument":
                assert f"process {victim} (" in first["message"], first
                assert "timeout is -1.0" in first["message"], first
                assert first["seconds"] < 30, first  # of 60
        for name, (before, during, after) in found.items():
            assert "error" not in before, (number, name, before)
            # Whoever looks late finds process 0 in the next save.
            errors = {"KeyboardInterrupt"} if number == victim else {"ProcessFailedError", "TimedOutError"}
            assert during["error"] in errors, (number, name, during)
            assert during["seconds"] < 30, (number, name, during)  # of 60
            assert "error" not in after, (number, name, after)


def test_an_interrupt_of_the_first_save_is_got_over(tmp_path: Path) -> None:
    zero, one = results(run_job(interrupts_the_first_save, 2, devices=1, arguments=[str(tmp_path)], timeout=120))
    assert (zero[0]["error"], one[0]["error"]) == ("TimedOutError", "KeyboardInterrupt")
    # The first answers may still be to the call that was given up; then all are at the same call again.
    for found in (zero, one):
        assert "error" not in found[-1], found


@pytest.mark.parametrize("points", [8, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("door", ["save", "run"])
@pytest.mark.parametrize("victim", [0, 1])
def test_an_interrupt_at_any_line_is_got_over(
    tmp_path: Path, crews: Crews, victim: int, door: str, points: int
) -> None:
    arguments = [str(tmp_path), victim, door, points, 60.0]
    every = results(crews.run(interrupts_any_line, 2, devices=1, arguments=arguments, timeout=300))
    for number, found in enumerate(every):
        for during, *_, last in found:
            if number == victim:
                # A call that looks at fewer messages while it waits may end before so many lines have gone by.
                assert during.get("error", "KeyboardInterrupt") == "KeyboardInterrupt", during
            assert during["seconds"] < 30, (number, during)  # of 60
            assert "error" not in last, (number, found)
