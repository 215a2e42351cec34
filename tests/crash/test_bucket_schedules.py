"""A slice of the simulated schedules over a bucket, and proof that broken protocols are found by it."""

from __future__ import annotations

import pytest

from torture.broken_bucket_protocols import BROKEN_BUCKETS
from torture.bucket_programs import BucketProtocol
from torture.schedules import tried

pytestmark = pytest.mark.slow

SEED = 5
KEY = "a/treering.json"
MARKER = "a/.treering.json.0123456789abcdef.treering-tmp"


def test_a_slice_of_the_schedules_keeps_the_rules_and_visits_every_end() -> None:
    found = tried(SEED, range(1500), store="bucket")
    assert found.violations == []
    saves = {f"save: {end}" for end in ("done", "exists", "lost", "unknown", "failed", "interrupted")}
    others = {"remove: removed", "remove: not removed", "load: loaded", "load: not found", "copy: done", "damaged"}
    assert saves | others | {"kill", "sleep", "deaf", "late", "twice", "interrupt"} <= set(found.counts)


def test_the_same_seed_gives_the_same_schedules_over_a_bucket() -> None:
    assert tried(SEED, range(40), store="bucket") == tried(SEED, range(40), store="bucket")
    assert tried(SEED, range(40), store="bucket").counts != tried(SEED + 1, range(40), store="bucket").counts


def test_a_reader_is_owed_no_data_that_only_the_index_of_a_newer_version_could_list() -> None:
    # A save replaces that index, which it cannot read, and sweeps what is older than a day, while a reader sleeps.
    found = tried(28116739, range(936519, 936520), store="bucket")
    assert found.violations == []
    assert found.counts["load: loaded"] == 1


@pytest.mark.parametrize("protocol", BROKEN_BUCKETS.values(), ids=BROKEN_BUCKETS.keys())
def test_a_broken_protocol_is_found_over_a_bucket(protocol: BucketProtocol) -> None:
    assert tried(SEED, range(4000), protocol=protocol, enough=1, store="bucket").violations
