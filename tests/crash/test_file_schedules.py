"""A slice of the simulated schedules of a single file in a bucket, and proof that broken protocols are found by it."""

from __future__ import annotations

import pytest

from torture.broken_bucket_protocols import BROKEN_FILES
from torture.file_simulation import FileProtocol
from torture.schedules import tried

SEED = 5


def test_a_slice_of_the_schedules_keeps_the_rules_and_visits_every_end() -> None:
    found = tried(SEED, range(4000), store="file")
    assert found.violations == []
    ends = {"done", "lost", "unknown", "interrupted"}
    assert ends | {"kill", "interrupt", "sleep", "deaf", "twice", "late"} <= set(found.counts)


def test_the_same_seed_gives_the_same_schedules_of_a_file() -> None:
    assert tried(SEED, range(100), store="file") == tried(SEED, range(100), store="file")
    assert tried(SEED, range(100), store="file").counts != tried(SEED + 1, range(100), store="file").counts


@pytest.mark.parametrize("protocol", BROKEN_FILES.values(), ids=BROKEN_FILES.keys())
def test_a_broken_protocol_of_a_file_is_found(protocol: FileProtocol) -> None:
    assert tried(SEED, range(4000), protocol=protocol, enough=1, store="file").violations
