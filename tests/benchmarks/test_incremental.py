"""The benchmark of saves that share files runs, and counts bytes that do not depend on the machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import incremental


def test_it_measures_all_that_has_a_goal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incremental, "_COUNTS", (2, 3, 5))
    command.main(["incremental", "--json", "--rounds", "1", "--size", "0.04", "--dir", str(tmp_path)])
    said = json.loads(capsys.readouterr().out)
    found = {figure["name"]: (figure["found"], figure["goal"]) for figure in said["figures"]}
    assert len(found) == 10
    share, goal = found["leaves: bytes written, to those of a full save"]
    assert 0.1 < share <= goal
    assert not list(tmp_path.iterdir())
