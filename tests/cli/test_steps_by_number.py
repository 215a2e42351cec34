"""Verbs that take steps of a run by their numbers, and what verbs that write say in the end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import treering as tr
from tests.command import inside
from treering.errors import NotFoundError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with tr.Run(tmp_path / "run") as run:
        for step, size in ((1, 10), (2, 1000), (3, 100)):
            run.save(step, {"w": np.zeros(size), "b": np.zeros(2)})
    return tmp_path / "run"


def test_one_step_is_removed(run: Path) -> None:
    assert "removed step 2 of" in inside("rm", str(run), "2", code=0)[0]
    assert tr.Run(run).steps() == [1, 3]
    assert tr.verify(run).ok
    with pytest.raises(NotFoundError, match=r"no step 2; it has steps 1 and 3"):
        tr.Run(run).delete(2)
    tr.Run(run).delete(3)
    assert tr.Run(run).latest() == 1
    inside("rm", str(run / "step_00000001"), "1", code=2)


def test_two_steps_are_compared(run: Path) -> None:
    assert "w" in inside("diff", str(run), "1", "2", code=1)[0]
    inside("diff", str(run), "2", "2", code=0)
    assert "has no step 9" in inside("diff", str(run), "1", "9", code=2)[1]
    assert "two steps are compared: treering diff RUN 1 STEP" in inside("diff", str(run), "1", code=2)[1]
    for odd in ("one", "9" * 5000):
        assert "is not a whole number from 0 on" in inside("diff", str(run), odd, "2", code=2)[1]


def test_gc_refuses_to_keep_a_step_that_is_not_there(run: Path) -> None:
    for option in ((), ("--yes",)):
        told = inside("gc", str(run), "--keep-step", "2", "--keep-step", "9", *option, code=2)[1]
        assert "has no step 9\nhint: it has steps 1, 2 and 3\n" in told
    assert tr.Run(run).steps() == [1, 2, 3]
    inside("gc", str(run), "--keep-step", "2", "--yes", code=0)
    assert tr.Run(run).steps() == [2, 3]


def test_a_newest_step_whose_index_is_damaged_is_named(run: Path) -> None:
    index = run / "step_00000003" / "treering.json"
    index.write_bytes(b"x" + index.read_bytes()[1:])
    for arguments in (["inspect", run], ["ls", run, "*"], ["du", run], ["cat", run, "w"]):
        told = inside(*map(str, arguments), code=1)[1].splitlines()
        assert told[0].startswith(
            f"error: the newest step of {str(run)!r}, 3, cannot be read: {str(index)!r} is damaged"
        )
        assert told[1].startswith(f"hint: the step before it is {str(run / 'step_00000002')!r}; ")
    assert (
        f"3, cannot be read: {str(index)!r} is damaged"
        in inside("diff", str(run / "step_00000002"), str(run), code=2)[1]
    )
    for arguments in (["rm", run, "3"], ["diff", run, "2", "3"]):
        told = inside(*map(str, arguments), code=2)[1].splitlines()
        assert told[0].startswith(f"error: step 3 of {str(run)!r} is there, and cannot be read: ")
        assert told[1].endswith(f"remove {str(run / 'step_00000003')!r} and all below it yourself")
    assert "has no step 4" in inside("rm", str(run), "4", code=2)[1]
    for option in ((), ("--keep-step", "3"), ("--yes",)):
        assert "note: step 3 cannot be read, and is not removed: " in inside("gc", str(run), *option, code=0)[1]
    assert "step 3 cannot be read" in inside("gc", str(run), "--json", code=0)[0]
    assert tr.Run(run).steps() == [1, 2, 3]


def test_listings_are_sorted(run: Path) -> None:
    lines = inside("ls", str(run), "--sort", "bytes", code=0)[0].splitlines()
    assert [line.split()[0] for line in lines if line.split()[0].isdigit()] == ["2", "3", "1"]
    step = str(run / "step_00000002")
    assert [line.split()[0] for line in inside("ls", step, "--sort", "bytes", code=0)[0].splitlines()] == ["w", "b"]
    by_key, by_bytes = (inside("du", step, "--sort", order, code=0)[0] for order in ("key", "bytes"))
    assert by_key.index(" b\n") < by_key.index(" w\n")
    assert by_bytes.index(" b\n") > by_bytes.index(" w\n")


def test_verbs_that_write_say_what_they_wrote(run: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "a.npz")
    assert inside("convert", str(run / "step_00000001"), out, "--lose", "metadata", code=0)[0].startswith(
        f"{out}: npz, 2 leaves, "
    )
    copy = str(tmp_path / "copy")
    assert inside("cp", str(run), copy, code=0)[0].startswith(f"{copy}: run, 3 steps, ")
    tr.save(tmp_path / "n", {"n": 3})
    assert "accept it by --lose 'scalars'" in inside("convert", str(tmp_path / "n"), f"{copy}.npz", code=2)[1]
