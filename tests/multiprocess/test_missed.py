"""A process that misses a joint save, because it makes another call or none: the next saves of the job work."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocess.jobs import results, run_job
from tests.multiprocess.missed import misses_saves


@pytest.mark.parametrize("victim", [0, 1])
def test_a_missed_save_ends_no_later_one(tmp_path: Path, victim: int) -> None:
    every = results(run_job(misses_saves, 2, devices=1, arguments=[str(tmp_path), victim], timeout=120))
    for number, found in enumerate(every):
        for name, (missed, saved, loaded, saved_again, loaded_again) in found.items():
            elsewhere = number == victim and name == "nothing"
            assert missed.get("error") == (None if elsewhere else "Timeout"), (number, name, missed)
            assert "error" not in saved, (number, name, saved)
            assert "error" not in saved_again, (number, name, saved_again)
            # The first call that meets finds what the other one had left when it gave up.
            assert loaded.get("error") in {None, "Mismatch"}, (number, name, loaded)
            assert loaded_again["result"] == loaded_again["step"], (number, name, loaded_again)
