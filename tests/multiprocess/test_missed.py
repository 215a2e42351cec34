"""A process that misses a joint save, because it makes another call or none: the next saves of the job work."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.multiprocess.jobs import Crews, results
from tests.multiprocess.missed import misses_saves

_CALLS: Final = {
    "gc": "remove steps of ",
    "latest": "look for the latest step of ",
    "load": "load ",
    "load of what is replaced": "load ",
}


@pytest.mark.parametrize("victim", [0, 1])
def test_a_missed_save_ends_no_later_one(tmp_path: Path, crews: Crews, victim: int) -> None:
    every = results(crews.run(misses_saves, 2, devices=1, arguments=[str(tmp_path), victim], timeout=120))
    for number, found in enumerate(every):
        for name, (missed, saved, loaded, saved_again, loaded_again) in found.items():
            if name == "nothing":
                assert missed.get("error") == (None if number == victim else "TimedOutError"), (number, missed)
            else:
                assert missed["error"] == "MismatchError", (number, name, missed)
                assert f"process {1 - victim} came to save 'step_" in missed["message"], (number, name, missed)
                assert f"process {victim} came to {_CALLS[name]}" in missed["message"], (number, name, missed)
                assert missed["seconds"] < 30, (number, name, missed)  # of 60
            assert "error" not in saved, (number, name, saved)
            assert "error" not in saved_again, (number, name, saved_again)
            # The first call that meets finds what the other one had left when it gave up.
            assert loaded.get("error") in {None, "MismatchError", "TimedOutError"}, (number, name, loaded)
            assert loaded_again["result"] == loaded_again["step"], (number, name, loaded_again)
