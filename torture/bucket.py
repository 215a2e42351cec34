"""Attacks on checkpoints in a bucket of a real server: faults at every request, kills, races."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from torture.bucket_faults import strike_all, tell
from torture.bucket_kills import kill_bucket
from torture.bucket_races import race
from torture.bucket_servers import open_seaweed

__all__ = ["bucket"]


def bucket(options: argparse.Namespace, seed: int) -> int:
    """Run what is asked for, and print what was found.

    Returns:
        The exit code: 1 when a rule was broken.
    """
    violations = 0
    with open_seaweed() as server, open_seaweed() as other:
        if options.stride:
            violations += tell(strike_all(server, options.scene, options.fault, options.jobs, options.stride))
        if options.kills:
            killed = kill_bucket((server, other), options.kills, seed)
            _tell_violations(killed.wrong)
            outcomes = ", ".join(f"{count} left {what}" for what, count in killed.outcomes.most_common())
            print(f"{killed.kills} kills (seed {seed}), {killed.acknowledged} saves acknowledged before: {outcomes}")
            print(f"  {len(killed.wrong)} violations")
            violations += len(killed.wrong)
        if options.races:
            raced = race((server, other), options.races)
            _tell_violations(raced.wrong)
            outcomes = ", ".join(f"{count} {what}" for what, count in raced.outcomes.most_common())
            print(f"{raced.races} races: {raced.saves} saves acknowledged, {raced.reads} loads; {outcomes}")
            print(f"  {len(raced.wrong)} violations")
            violations += len(raced.wrong)
    return 1 if violations else 0


def _tell_violations(wrong: Sequence[str]) -> None:
    for what in wrong:
        print(f"VIOLATION {what}", flush=True)
