"""The column "a job" of the table in docs/runs.md: what two processes do, and what refuses them by name."""

from __future__ import annotations

from pathlib import Path

import treering as tr
from tests.multiprocess.jobs import Crews, results
from tests.multiprocess.what_works import tries_all


def test_each_part_works_in_a_job_or_is_refused_by_name(tmp_path: Path, crews: Crews) -> None:
    every = results(crews.run(tries_all, 2, devices=1, arguments=[str(tmp_path)], timeout=240))
    for process, said in enumerate(every):
        for name, refusal in {
            "6: await": "UnsupportedError: a job of several processes cannot await the steps of a run",
            "8: load in the background what lies over processes": "UnsupportedError: could not load ",
            "memory": "UnsupportedError: ",
            "a run in memory": "UnsupportedError: ",
            "3: leaves": "UnsupportedError: ",
        }.items():
            assert said.pop(name).startswith(refusal), (name, every)
        assert said == {
            "1, 3, 4, 5, 8: a run": [3, 0],
            "3, 7: resume": [30 + process, 0.0],
            "6: watch": [1, 2, 3],
            "6: hold": 2,
            "2: parts": ["adapter", "base"],
            "7, 8: begin": [3, [4]],
            "8: a file": ["w"],
            "8: another file": ["w"],
            "8: load in the background": ["adapter"],
            "1: base": None,
            "commits": [] if process else [1, 2, 3],
        }, every
    assert tr.verify(tmp_path / "incremental").ok
    assert tr.verify(tmp_path / "based").ok
