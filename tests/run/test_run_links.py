"""Links in the place of a step: no write follows one, and no reader of the run takes it for a step."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import treering as tr
from tests.command import copy_path, inside
from tests.on_disk import step_path
from treering.errors import ExistsError, FormatError, NotFoundError
from treering.leaves import tree_serialize_leaves

TREE = {"w": np.arange(3.0)}
OTHER = {"w": np.zeros(5)}


def save_step(run: Path) -> None:
    with tr.Run(run) as found:
        found.save(9, OTHER, rollback=True).result()


def save_by_hand(run: Path) -> None:
    tr.save(step_path(run, 9), OTHER, overwrite=True)


def save_by_hand_in_the_background(run: Path) -> None:
    tr.save_async(f"{step_path(run, 9)}/", OTHER, overwrite=True).result()


def save_leaves(run: Path) -> None:
    tree_serialize_leaves(step_path(run, 9), OTHER)


def a_run(path: Path) -> Path:
    with tr.Run(path) as run:
        run.save(9, OTHER)
    return path


def branch(run: Path) -> None:
    tr.Run(a_run(run.parent / "source")).branch(9, run)


def convert_run(run: Path) -> None:
    tr.convert(a_run(run.parent / "source"), run)


def convert_one(run: Path) -> None:
    tr.convert(step_path(a_run(run.parent / "source"), 9), step_path(run, 9), overwrite=True)


def save_weights(run: Path) -> None:
    tr.export(step_path(run, 9), OTHER, to="hf")


def convert_to(form: str) -> Callable[[Path], None]:
    def convert(run: Path) -> None:
        tr.convert(
            step_path(a_run(run.parent / "source"), 9), step_path(run, 9), to=form, lose="metadata", overwrite=True
        )

    return convert


def copy_run(run: Path) -> None:
    copy_path(str(a_run(run.parent / "source")), str(run), overwrite=True)


def copy_one(run: Path) -> None:
    copy_path(str(step_path(a_run(run.parent / "source"), 9)), str(step_path(run, 9)), overwrite=True)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "write",
    [
        save_step, save_by_hand, save_by_hand_in_the_background, save_leaves, branch, convert_run, convert_one,
        save_weights, convert_to("hf"), convert_to("leaves"), copy_run, copy_one,
    ],
)  # fmt: skip
@pytest.mark.parametrize("leads_to", ["a step", "an empty folder", "nothing"])
def test_no_write_goes_through_a_link(write: Callable[[Path], object], leads_to: str, tmp_path: Path) -> None:
    original = tmp_path / "original"
    with tr.Run(original) as run:
        run.save(9, TREE)
    place = {"a step": step_path(original, 9), "an empty folder": tmp_path / "empty", "nothing": tmp_path / "nothing"}
    (tmp_path / "empty").mkdir()
    (tmp_path / "run").mkdir()
    step_path(tmp_path / "run", 9).symlink_to(place[leads_to])
    told = "step_00000009' is a link in the place of a step, and is not followed|step_00000009' holds weights"
    told += "|a checkpoint of treering.save is at|step_00000009' is a file; the copy would be a folder"
    with pytest.raises((FormatError, ExistsError), match=told):
        write(tmp_path / "run")
    assert step_path(tmp_path / "run", 9).is_symlink()
    assert tr.load(step_path(original, 9))["w"].tolist() == [0.0, 1.0, 2.0]
    assert not list((tmp_path / "empty").iterdir())
    assert not (tmp_path / "nothing").exists()


def test_a_link_is_no_step_to_a_run(tmp_path: Path) -> None:
    for name in ("original", "run"):
        with tr.Run(tmp_path / name) as run:
            run.save(3, TREE)
    step_path(tmp_path / "run", 9).symlink_to(step_path(tmp_path / "original", 3))
    run = tr.Run(tmp_path / "run")
    assert run.steps() == [3]
    assert run.load()["w"].tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(NotFoundError, match="has no step 9; it has step 3"):
        run.load(9)


def test_other_links_to_folders_stay_links(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    (tmp_path / "latest").symlink_to(tmp_path / "disk" / "step_00000001")
    with tr.Run(tmp_path / "run") as run:
        run.save(1, TREE)
    tr.save(tmp_path / "latest", OTHER, overwrite=True)
    assert tr.load(tmp_path / "disk" / "step_00000001")["w"].size == 5


def test_no_removal_goes_through_a_link(tmp_path: Path) -> None:
    with tr.Run(tmp_path / "original") as run:
        run.save(9, TREE)
    with tr.Run(tmp_path / "run") as run:
        run.save(3, TREE)
    step_path(tmp_path / "run", 9).symlink_to(step_path(tmp_path / "original", 9))
    last = tr.Run(tmp_path / "run", keep=tr.KeepLast(1))
    with pytest.raises(NotFoundError, match="has no step 9; it has step 3"):
        last.delete(9)
    assert "has no step 9" in inside("rm", str(tmp_path / "run"), "9", code=2)[1]
    last.save(3, OTHER, rollback=True)  # goes back to an earlier step than that of the link
    last.gc(dry_run=False)
    last.close(sweep=True)
    assert last.steps() == [3]
    assert step_path(tmp_path / "run", 9).is_symlink()
    assert tr.Run(tmp_path / "original").load()["w"].tolist() == [0.0, 1.0, 2.0]
