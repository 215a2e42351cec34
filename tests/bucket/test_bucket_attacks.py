"""A slice of the attacks on a bucket of a real server; ``python -m torture bucket`` does all of them."""

from collections.abc import Iterator

import pytest

from tests.buckets import without_settings
from torture.bucket_faults import Case, Striker
from torture.bucket_kills import kill_bucket
from torture.bucket_races import race
from torture.bucket_scenes import SCENES
from torture.bucket_servers import BucketServer, open_seaweed
from torture.fault_proxy import Fault

pytestmark = pytest.mark.bucket

BY_NAME = {scene.name: scene for scene in SCENES}


@pytest.fixture(scope="module")
def striker(seaweed: BucketServer) -> Iterator[Striker]:
    with Striker(seaweed) as striker:
        yield striker


def commits(cases: list[Case]) -> list[Case]:
    """Return the cases of the last conditional PUT of a key, which is the commit."""
    puts = [case for case in cases if case.conditional and case.target.endswith(r"/treering\.json$")]
    return [case for case in puts if case.number == puts[-1].number and case.target == puts[-1].target]


@pytest.mark.parametrize("name", ["save", "overwrite"])
def test_each_fault_at_the_commit(striker: Striker, name: str) -> None:
    cases = commits(striker.cases(BY_NAME[name]))
    assert {Fault.DROP_ANSWER, Fault.CONFLICT, Fault.LATE, Fault.TWICE} <= {case.fault for case in cases}
    found = {str(case): striker.strike(case) for case in cases}
    assert {case: one.wrong for case, one in found.items() if one.wrong} == {}
    assert "not reached" not in {one.outcome for one in found.values()}


def test_a_lost_answer_at_the_commit_is_not_told(striker: Striker) -> None:
    for case in commits(striker.cases(BY_NAME["overwrite"])):
        if case.fault in {Fault.DROP_ANSWER, Fault.UNAVAILABLE_DONE, Fault.TWICE} and case.times == 1:
            assert striker.strike(case).outcome == "committed"


def test_each_fault_at_the_copy_of_a_shared_file(striker: Striker) -> None:
    cases = striker.cases(BY_NAME["save with a base"])
    copies = [case for case in cases if case.method == "PUT" and "data" in case.target and not case.conditional]
    assert {Fault.DROP_ANSWER, Fault.UNAVAILABLE_DONE, Fault.DENIED, Fault.LATE} <= {case.fault for case in copies}
    found = {str(case): striker.strike(case) for case in copies}
    assert {case: one.wrong for case, one in found.items() if one.wrong} == {}
    assert "not reached" not in {one.outcome for one in found.values()}


@pytest.mark.parametrize("fault", [Fault.FLIP, Fault.SHORTEN, Fault.TRUNCATE, Fault.RESET_ANSWER, Fault.UNAVAILABLE])
def test_a_load_whose_answers_are_spoiled(striker: Striker, fault: Fault) -> None:
    cases = [case for case in striker.cases(BY_NAME["load of ranges"]) if case.fault is fault]
    assert len(cases) > 2
    found = {str(case): striker.strike(case) for case in cases}
    assert {case: (one.outcome, one.wrong) for case, one in found.items()} == dict.fromkeys(found, ("committed", []))


@pytest.fixture
def two(seaweed: BucketServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[BucketServer, BucketServer]]:
    """Two servers with one name of a bucket, between which the environment changes."""
    with without_settings(monkeypatch), open_seaweed() as other:
        for name, value in seaweed.environment().items():
            monkeypatch.setenv(name, value)
        yield seaweed, other


def test_savers_with_two_accounts_that_are_killed(two: tuple[BucketServer, BucketServer]) -> None:
    killed = kill_bucket(two, 6, seed=7)
    assert killed.wrong == []
    assert killed.kills == sum(killed.outcomes.values()) == 6


def test_savers_overwriters_readers_and_a_collector_race(two: tuple[BucketServer, BucketServer]) -> None:
    raced = race(two, 4)
    assert raced.wrong == []
    assert raced.races == 4
    assert raced.saves >= 4
    assert raced.reads >= 4
