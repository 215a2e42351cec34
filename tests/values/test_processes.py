"""Numbers of processes as people read them, and where a deadline comes from."""

import pytest

from treering._values.processes import Processes, format_processes, timeout_seconds
from treering._values.timing import DEFAULT_TIMEOUT
from treering.errors import UnsupportedError


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([0], "process 0"),
        ([3, 1], "processes 1 and 3"),
        ([1, 2], "processes 1 and 2"),
        ([1, 2, 3], "processes 1-3"),
        ([9, 1, 2, 3, 9], "processes 1-3 and 9"),
        (
            range(0, 60, 2),
            "processes 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36 and 11 more",
        ),
    ],
)
def test_named(numbers: list[int], text: str) -> None:
    assert format_processes(numbers) == text


def test_process_0_leads_and_the_others_are_all_but_this_one() -> None:
    assert Processes(this=0, count=1).others == ()
    assert Processes(this=0, count=2).is_coordinator
    assert not Processes(this=1, count=2).is_coordinator
    assert Processes(this=1, count=4).others == (0, 2, 3)


def test_the_argument_wins_over_the_environment() -> None:
    assert timeout_seconds(5, {"TREERING_TIMEOUT_S": "7"}) == 5.0
    assert timeout_seconds(None, {"TREERING_TIMEOUT_S": "7.5"}) == 7.5
    assert timeout_seconds(None, {"TREERING_TIMEOUT_S": ""}) == DEFAULT_TIMEOUT
    assert timeout_seconds(None, {}) == 600.0


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf"), True, "soon"])
def test_what_is_no_time_is_refused_by_its_name(wrong: object) -> None:
    with pytest.raises(UnsupportedError, match=r"timeout is .*positive number of seconds"):
        timeout_seconds(wrong, {})  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="TREERING_TIMEOUT_S is"):
        timeout_seconds(None, {"TREERING_TIMEOUT_S": "-3"})
