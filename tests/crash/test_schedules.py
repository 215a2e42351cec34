"""A slice of the simulated schedules, and proof that broken protocols are found by it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from tests.crash.attacks import attack
from torture.broken_protocols import BROKEN_SAVES, BROKEN_STEPS, MUTANTS, OVER_MEMORY
from torture.schedules import tried
from torture.virtual_processes import Protocol

pytestmark = pytest.mark.slow

SEED = 5
SLICE = range(2000)


def test_a_slice_of_the_schedules_keeps_the_rules_and_visits_every_end() -> None:
    found = tried(SEED, SLICE)
    assert found.violations == []
    ends = {
        "committed",
        "timed out",
        "timed out, outcome unknown",
        "overtaken",
        "refused",
        "StoreError",
        "ProcessFailedError",
        "MismatchError",
        "KeyboardInterrupt",
    }
    assert ends | {"killed", "paused", "interrupted", "restarted"} <= set(found.counts)
    assert {"long signatures", "sums without payloads", "nothing left"} <= set(found.counts)


def test_many_processes_of_a_job() -> None:
    assert tried(SEED, range(20), processes=40).violations == []


def test_a_slice_over_a_store_that_proves_of_nobody_that_it_lives() -> None:
    found = tried(SEED, range(500), store="memory")
    assert found.violations == []
    assert {"committed", "refused", "killed", "paused", "late", "timed out, outcome unknown"} <= set(found.counts)
    assert {"long signatures", "sums without payloads", "nothing left"} <= set(found.counts)


@pytest.mark.parametrize("number", [134467, 507581])
def test_a_process_that_withdraws_its_vote_may_be_named_before_it_has_left_over_memory(number: int) -> None:
    # It gives up on a process 0 that is slow or paused, which hears of that at once, and so tells the others why.
    found = tried(281325363, range(number, number + 1), store="memory")
    assert found.violations == []
    assert found.counts["timed out, outcome unknown"]


def test_the_same_seed_gives_the_same_schedules() -> None:
    assert tried(SEED, range(10), store="memory") == tried(SEED, range(10), store="memory")
    assert tried(SEED, range(40)) == tried(SEED, range(40))
    assert tried(SEED, range(40)).counts != tried(SEED + 1, range(40)).counts


@pytest.mark.parametrize("protocol", MUTANTS.values(), ids=MUTANTS.keys())
def test_a_broken_protocol_is_found(protocol: Protocol) -> None:
    assert tried(SEED, SLICE, protocol=protocol, enough=1).violations


@pytest.mark.parametrize("broken", BROKEN_STEPS.values(), ids=BROKEN_STEPS.keys())
def test_a_broken_step_of_the_protocol_is_found(
    broken: tuple[ModuleType, str, Callable[..., object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*broken)
    assert tried(SEED, SLICE, enough=1).violations


@pytest.mark.parametrize("protocol", OVER_MEMORY.values(), ids=OVER_MEMORY.keys())
def test_a_broken_protocol_is_found_over_the_memory_store(protocol: Protocol) -> None:
    assert tried(SEED, SLICE, protocol=protocol, enough=1, store="memory").violations


@pytest.mark.parametrize("broken", BROKEN_SAVES.values(), ids=BROKEN_SAVES.keys())
def test_a_broken_save_over_the_memory_store_is_found(
    broken: tuple[type, str, Callable[..., object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*broken)
    assert tried(SEED, SLICE, enough=1, store="memory").violations


def test_the_command_says_what_it_saw() -> None:
    done = attack("schedules", "--schedules", "60", "--seed", "5", "--jobs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n0 violations" in done.stdout
    assert "60 schedules in " in done.stdout
    assert "committed" in done.stdout
