"""Bombs of 1 to 4 MB: reading takes at most 100 times the input and 64 MiB; a result or an error of ours comes out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.memory import run_script
from tests.serialization.hostile_memory import BOMBS, CLAIMS, MIB

SCRIPT = Path(__file__).with_name("hostile_memory.py")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each reader took for each bomb."""
    folder = tmp_path_factory.mktemp("bombs")
    return run_script(SCRIPT, folder)


def test_every_bomb_ends_within_the_bounds(measured: list[dict[str, Any]]) -> None:
    assert {run["name"] for run in measured} == set(BOMBS)
    bad = [run for run in measured if run["outcome"] == "died" or run["grown"] > 100 * run["size"] + 64 * MIB]
    assert bad == []


def test_no_message_repeats_the_bomb(measured: list[dict[str, Any]]) -> None:
    assert [run["name"] for run in measured if len(run["outcome"]) > 2000] == []


def test_every_bomb_ends_in_time(measured: list[dict[str, Any]]) -> None:
    assert [run for run in measured if run["seconds"] > 30] == []


def test_false_claims_cost_nothing(measured: list[dict[str, Any]]) -> None:
    claims = [run for run in measured if run["name"] in CLAIMS]
    assert len(claims) == 2 * len(CLAIMS)
    for run in claims:
        assert run["outcome"].startswith("CorruptError")
        assert run["grown"] < 4 * run["size"] + 8 * MIB
