"""A run is not begun in a checkpoint's folder, nor beside the numbered steps of another library."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering as tr
from tests.on_disk import step_path
from treering.errors import FormatError

TREE = {"w": np.arange(3.0)}

# Names as Orbax 0.12 writes them (several items, one item, names with a prefix), and as others do.
OTHERS = {
    "manager": ["1000/_CHECKPOINT_METADATA", "1000/commit_success.txt", "1000/state/_METADATA", "metadata/metadata"],
    "single": ["2000/default/_METADATA", "2000/default/manifest.ocdbt"],
    "bare": ["3/default/manifest.ocdbt"],
    "prefixed": ["checkpoint_1000/_CHECKPOINT_METADATA", "checkpoint_900/_CHECKPOINT_METADATA"],
    "as ours": ["step_00001000/_CHECKPOINT_METADATA", "step_00001000/default/_METADATA"],
    "levanter": ["step-7000/metadata.json", "step-7000/model/.zgroup"],
    "flax": ["checkpoint_1000", "checkpoint_2000"],
    "transformers": ["checkpoint-500/model.safetensors", "checkpoint-500/trainer_state.json"],
    "leaves": ["run-1000/tensorstore_index.json"],
    "deepspeed": ["global_step1000/pytorch_model.bin"],
}  # fmt: skip
NAMED = {
    "flax": "flax.training",
    "levanter": "zarr",
    "transformers": "safetensors",
    "leaves": "leaves directory",
    "deepspeed": "PyTorch",
}

CALLS: dict[str, Callable[[tr.Run], Any]] = {
    "attempts": lambda run: run.attempts(1),
    "best": lambda run: run.best("loss"),
    "branch": lambda run: run.branch(1, run.path.parent / "branch"),
    "gc": lambda run: run.gc(),
    "gc for good": lambda run: run.gc(dry_run=False),
    "hold": lambda run: run.hold(1),
    "watch": lambda run: list(run.watch(timeout=0)),
    "delete": lambda run: run.delete(1),
    "latest": lambda run: run.latest(),
    "load": lambda run: run.load(),
    "load a step": lambda run: run.load(1),
    "load_or_init": lambda run: run.load_or_init(lambda: TREE),
    "metrics": lambda run: run.metrics(1),
    "save": lambda run: run.save(5, TREE),
    "save over": lambda run: run.save(5, TREE, rollback=True),
    "steps": lambda run: run.steps(),
    "str": str,
}
# What looks into no folder.
ELSEWHERE = {"close", "keep", "path", "preempted", "save_every", "save_on_signal", "status", "wait"}


def made(path: Path, names: list[str]) -> Path:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).touch()
    return path


def test_all_that_a_run_has_is_in_the_table() -> None:
    public = {name for name in dir(tr.Run) if not name.startswith("_")}
    assert public == {name.split()[0] for name in CALLS if name != "str"} | ELSEWHERE


@pytest.mark.sampled(3)
@pytest.mark.parametrize("call", CALLS)
def test_a_checkpoint_is_no_run_for_any_call(tmp_path: Path, call: str) -> None:
    tr.save(tmp_path / "ckpt", TREE)
    there = sorted(tmp_path.rglob("*"))
    with pytest.raises(FormatError, match=r"ckpt' is a checkpoint, not a run; treering\.load"):
        CALLS[call](tr.Run(tmp_path / "ckpt"))
    assert sorted(tmp_path.rglob("*")) == there


@pytest.mark.sampled(3)
@pytest.mark.parametrize("call", CALLS)
def test_another_librarys_steps_are_refused_by_any_call(tmp_path: Path, call: str) -> None:
    made(tmp_path / "run", OTHERS["manager"] + OTHERS["single"])
    there = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        FormatError, match=r"numbered steps.*'1000', '2000'; '2000' is an O.*; use another folder for the run"
    ):
        CALLS[call](tr.Run(tmp_path / "run"))
    assert sorted(tmp_path.rglob("*")) == there


@pytest.mark.parametrize("kind", OTHERS)
def test_it_is_named(tmp_path: Path, kind: str) -> None:
    made(tmp_path / "run", OTHERS[kind])
    with pytest.raises(FormatError, match=f"is (an|a) .*{NAMED.get(kind, 'O(rbax|CDBT)')}"):
        tr.Run(tmp_path / "run").load_or_init(lambda: TREE)


def test_checkpoints_of_ours_with_other_names_are_refused(tmp_path: Path) -> None:
    for step in (900, 1000):
        tr.save(tmp_path / "run" / str(step), TREE)
    with pytest.raises(
        FormatError, match=r"'1000' is a checkpoint of treering; name the folders .* 'step_00001000' for '1000'"
    ):
        tr.Run(tmp_path / "run").latest()
    for step in (900, 1000):
        (tmp_path / "run" / str(step)).rename(step_path(tmp_path / "run", step))
    assert tr.Run(tmp_path / "run").steps() == [900, 1000]


def test_a_run_that_has_steps_goes_on_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with tr.Run(path) as run:
        run.save(1, TREE)
    made(path, OTHERS["manager"])
    with tr.Run(path, keep=tr.KeepLast(1)) as run:
        assert run.load_or_init(lambda: TREE).step == 1
        run.save(2, TREE)
    shutil.rmtree(step_path(path, 2))
    assert tr.Run(path).steps() == []  # run.json says that it is a run
    assert (path / "1000" / "commit_success.txt").exists()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "names",
    [
        [],
        ["1000/notes.txt"],
        ["2024/events.out.tfevents.1"],
        ["checkpoint.txt"],
        ["logs/7"],
        ["step_3/treering.json"],
        ["gpt2/model.safetensors", "llama-3/pytorch_model.bin", "era5/.zgroup", "teacher_v2/treering.json"],
        ["config.json", "wandb/run-20240101_120000-ab12/files/config.yaml", "checkpoints/1000/_CHECKPOINT_METADATA"],
    ],
)
def test_what_is_no_step_is_left_alone(tmp_path: Path, names: list[str]) -> None:
    made(tmp_path / "run", names)
    (tmp_path / "run").mkdir(exist_ok=True)
    with tr.Run(tmp_path / "run") as run:
        assert (run.steps(), run.latest(), run.best("loss")) == ([], None, None)
        run.save(1, TREE)
    assert all((tmp_path / "run" / name).exists() for name in names)


@pytest.mark.parametrize(
    ("form", "says"), [("flax", "treering.load reads one such file"), ("single", "treering convert")]
)
def test_the_error_says_what_reads_the_steps_of_others(tmp_path: Path, form: str, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        tr.Run(made(tmp_path / "run", OTHERS[form])).latest()
