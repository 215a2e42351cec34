"""Processes save parts together, and load what lies over each other; each hears the same of what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import treering as tr
from tests.multiprocess.jobs import Crews, results
from tests.multiprocess.parts import saves_and_loads


@pytest.mark.slow
def test_parts_of_a_job(crews: Crews, tmp_path: Path) -> None:
    found = results(crews.run(saves_and_loads, 2, devices=2, arguments=[str(tmp_path)]))
    for one in found:
        assert not one["bad"], "\n".join(one["bad"])
        assert one["count"] == 8
        refused = one["refused"]
        assert "UnsupportedError: could not load" in refused["background"]
        assert "in the background: an array lies over several processes" in refused["background"]
        assert "in the background: an array lies over several processes" in refused["function"]
        assert "differs from that of process 0" in refused["other globs"]
        assert "nothing in the tree matches 'nothing' of only=" in refused["no match"]
        assert "differs from that of process 0" in refused["other dtypes"]
        assert "does not fit float16" in refused["too large"]
        assert "at leaf 'w'" in refused["too large"]
    assert not (tmp_path / "no" / "treering.json").exists()
    # Each process converts by itself: of two that take the same path, one at least hears that the other has it.
    said = [one["refused"]["converted"].partition(":")[0] for one in found]
    assert said.count("") == 1, said
    assert {*said} <= {"", "ExistsError", "BusyError"}, said
    assert tr.verify(tmp_path / "together").ok
    part = tr.load(tmp_path / "later")
    assert (part["lora"]["a"].dtype, part["lora"]["b"].dtype, part["step"]) == ("float16", np.float64, 2)
    assert "part: only='lora'" in str(tr.inspect(tmp_path / "run"))
    assert all(tr.verify(tmp_path / name).ok for name in ("base", "lora", "later", "run"))
