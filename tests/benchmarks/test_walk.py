"""The walk through the package: every way is counted, and counts agree with what they are made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.walk import WAYS, Way, walk
from treering import SaveEvery


def test_every_way_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["walk", "--json"]) == 0
    found = {each["way"]: each for each in json.loads(capsys.readouterr().out)["ways"]}
    assert list(found) == [way.name for way in WAYS]
    for name, each in found.items():
        assert 3 < each["modules"] < each["calls"], name
        assert each["modules"] == len(each["calls_by_module"])
        assert each["calls"] == sum(each["calls_by_module"].values())
        assert each["climbs"] == sum(climb["times"] for climb in each["climbs_by_function"]) < each["calls"]
        assert {climb["function"] for climb in each["climbs_by_function"] if climb["from"] == climb["to"]} == set()
        in_a_file = name not in {"bucket save", "Run.save, its caller's thread"}
        assert (each["frames"] is not None) == in_a_file
        assert each["goals"].keys() <= each.keys()
    assert "checkpoint" in found["save"]["calls_by_module"]


def test_only_calls_of_the_package_count(tmp_path: Path) -> None:
    def prepare(folder: Path, tree: Any) -> Any:
        assert folder == tmp_path
        return lambda name: [len(name), repr(SaveEvery(steps=2))]

    walked = walk(Way(name="rules", prepare=prepare), tmp_path)
    assert set(walked.modules) == {"rules", "_values.human"}
    assert not walked.climbs
    assert walked.frames is None
    assert walk(Way(name="nothing", prepare=lambda folder, tree: len), tmp_path).figures() == {
        "modules": 0,
        "calls": 0,
        "climbs": 0,
        "frames": None,
    }
