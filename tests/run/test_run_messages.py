"""Folders of steps that were never saved, in which processes of a job have left messages."""

from __future__ import annotations

from pathlib import Path

import pytest

import treering as tr
from tests.folders import names
from tests.on_disk import heartbeat_name, step_path, vote_name
from tests.stores import put_messages

ATTEMPT = "0123456789abcdef"


def leave_messages(run: Path, step: int) -> None:
    """Let three messages be all that is in the folder of a step; one lies in a folder of messages."""
    put_messages(step_path(run, step), vote_name(ATTEMPT, 1), f".treering-{ATTEMPT}-left-00300", heartbeat_name(1))


def folders(run: Path) -> list[int]:
    return sorted(int(name.removeprefix("step_")) for name in names(run) if name.startswith("step_"))


@pytest.mark.parametrize("how", ["save", "gc", "sweep"])
def test_a_folder_of_messages_goes_once_a_newer_step_is_saved(tmp_path: Path, how: str) -> None:
    path = tmp_path / "run"
    with tr.Run(path) as run:
        run.save(1, {"a": 1}).result()
        if how == "save":
            leave_messages(path, 2)
        run.save(3, {"a": 3}).result()
    if how != "save":
        leave_messages(path, 2)
    if how == "gc":
        run.gc(dry_run=False)
    elif how == "sweep":
        with tr.Run(path) as again:
            again.save(4, {"a": 4}).result()
            again.close(sweep=True)
    assert folders(path) == ([1, 3, 4] if how == "sweep" else [1, 3])


def test_messages_of_a_later_step_stay_for_the_process_that_is_late(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with tr.Run(path) as run:
        leave_messages(path, 2)
        run.save(1, {"a": 1}).result()
    assert folders(path) == [1, 2]
    run.gc(dry_run=False)
    assert folders(path) == [1, 2]
