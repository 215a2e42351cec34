"""Bombs of up to some megabytes: reading takes at most 100 times the input and 64 MiB, and ends in our errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.hostile_memory import MIB
from tests.memory import run_script

SCRIPT = Path(__file__).with_name("hostile_memory.py")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each reader took for each bomb."""
    folder = tmp_path_factory.mktemp("bombs")
    return run_script(SCRIPT, folder)


def test_every_bomb_ends_within_the_bounds(measured: list[dict[str, Any]]) -> None:
    assert len(measured) > 100
    bad = [run for run in measured if run["outcome"] == "died" or run["grown"] > 100 * run["size"] + 64 * MIB]
    assert bad == []


def test_no_message_repeats_the_bomb(measured: list[dict[str, Any]]) -> None:
    assert [run["name"] for run in measured if len(run["outcome"]) > 2000] == []


def test_every_bomb_ends_in_time(measured: list[dict[str, Any]]) -> None:
    assert [run for run in measured if run["seconds"] > 60] == []


def test_false_claims_cost_nothing(measured: list[dict[str, Any]]) -> None:
    claims = [run for run in measured if run["claim"]]
    assert len(claims) >= 20
    for run in claims:
        assert run["grown"] < 4 * run["size"] + 16 * MIB, run
        if run["reader"] == "load":
            assert run["outcome"].startswith(("CorruptError", "UnsupportedError")), run
