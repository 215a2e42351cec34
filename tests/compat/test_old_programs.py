"""What commits of treering wrote is read by the program of today, which goes on writing there."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.compat import golden_checkpoints, old_programs
from tests.compat.old_programs import GOLDEN, MAIN, PARTS

NAMES = sorted(path.name.removesuffix(".tar.gz") for path in GOLDEN.iterdir())


@pytest.fixture(scope="module", params=NAMES)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with all that one program wrote."""
    folder = tmp_path_factory.mktemp("program")
    old_programs.unpack(request.param, folder)
    return folder


@pytest.mark.sampled(3)
@pytest.mark.parametrize("part", PARTS)
def test_what_it_wrote_is_read_and_written_over(program: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    monkeypatch.chdir(program / part)
    PARTS[part].check()
    PARTS[part].go_on()


def test_a_value_that_differs_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old_programs.unpack(NAMES[0], tmp_path)
    monkeypatch.chdir(tmp_path / "checkpoints")
    monkeypatch.setitem(golden_checkpoints.METADATA, "run", "b")
    with pytest.raises(AssertionError):
        PARTS["checkpoints"].check()


def test_golden_files_of_both_commits_are_there() -> None:
    assert NAMES == ["71da083", "7776e7a"]


@pytest.mark.slow
def test_what_this_program_writes_it_reads(tmp_path: Path) -> None:
    for command in ("write", "check"):
        done = subprocess.run([*MAIN, command, str(tmp_path / "all")], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert done.stdout.count("read, compared, written over") == len(PARTS)
