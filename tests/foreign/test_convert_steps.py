"""A root of Orbax's CheckpointManager: listed like a run, and converted into one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering as tr
from tests.command import inside
from tests.stores import copy_to_memory
from treering.errors import CorruptError, ExistsError, NotFoundError, TreeringError, UnsupportedError

GOLDEN = Path(__file__).parent / "golden" / "orbax" / "manager"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "root"))


def _metadata(step: Path) -> dict[str, Any]:
    with tr.open(step) as opened:
        return dict(opened.metadata)


def _json(*arguments: object) -> Any:
    return json.loads(inside(*map(str, arguments), "--json", code=0)[0])


def test_every_step_becomes_a_step_of_a_run(root: Path, tmp_path: Path) -> None:
    new = tmp_path / "run"
    tr.convert(root, new)
    run = tr.Run(new)
    assert (run.steps(), run.metrics(10), run.best("loss")) == ([10, 20], {"loss": 0.1}, 20)
    tree = run.load(10)
    assert (tree["w"].tolist(), int(tree["n"])) == ([10, 10, 10], 10)
    metadata = _metadata(new / "step_00000010")
    note = metadata.pop("treering")
    assert metadata == {"config": {"hidden": 4}, "custom_metadata": {"run": "golden"}}
    assert note["saved"] == "2026-11-20T23:33:52.138032Z"
    assert (note["converted"]["path"], note["converted"]["step"]) == (str(root), 10)
    assert tr.verify(new).ok
    before = {path: path.stat().st_mtime_ns for path in new.rglob("*.safetensors")}
    tr.convert(f"{root}/.", new)
    assert {path: path.stat().st_mtime_ns for path in new.rglob("*.safetensors")} == before


def test_later_steps_are_added_and_removed_ones_stay(root: Path, tmp_path: Path) -> None:
    new = tmp_path / "run"
    shutil.move(root / "20", tmp_path / "20")
    tr.convert(root, new, dtype="float16")
    shutil.move(tmp_path / "20", root / "20")
    shutil.move(root / "10", tmp_path / "10")
    tr.convert(root, new, dtype="float16")
    run = tr.Run(new)
    assert (run.steps(), run.load(10)["w"].dtype, run.load(20)["w"].dtype) == ([10, 20], "float16", "float16")
    with pytest.raises(ExistsError, match="with other options"):
        tr.convert(root, new)
    elsewhere = Path(shutil.copytree(root, tmp_path / "elsewhere"))
    with pytest.raises(ExistsError, match="its step 10 is none of the steps of"):
        tr.convert(elsewhere, new, dtype="float16")
    shutil.move(tmp_path / "10", elsewhere / "10")
    tr.convert(elsewhere, new, dtype="float16")
    shutil.move(elsewhere / "10", elsewhere / "30")
    tr.convert(elsewhere, tmp_path / "renamed")
    assert tr.Run(tmp_path / "renamed").steps() == [20, 30]


def test_damage_and_loss_are_errors_that_name_the_step(root: Path, tmp_path: Path) -> None:
    new = tmp_path / "run"
    manifest = root / "10" / "state" / "manifest.ocdbt"
    data = manifest.read_bytes()
    manifest.write_bytes(data[:20])
    with pytest.raises(TreeringError, match=r"^step 10 of .* could not be converted"):
        tr.convert(root, new)
    assert tr.Run(new).steps() == [20]
    manifest.write_bytes(data)
    (root / "10" / "dataset").mkdir()
    (root / "10" / "dataset" / "process_0-of-2.json").write_text("{}")
    with pytest.raises(UnsupportedError, match=r"(?s)^step 10 of .*: .*the item 'dataset' has the states of"):
        tr.convert(root, new)
    told = "the item 'dataset' has the states of iterators of 2 processes, and a step has room for one"
    assert f"note: step 10: {told}" in inside("log", str(root), code=0)[0]
    err = inside("convert", str(root), str(new), code=2)[1]
    assert told in err
    assert "accept it by --lose 'items' (such items of a step are left out)" in err
    with pytest.raises(UnsupportedError, match=r"accept it by lose= with 'items' \(such items"):
        tr.convert(root, new)
    for lose in ("items", "dataset"):
        with pytest.raises(UnsupportedError, match="dataset"):
            tr.convert(root, tmp_path / lose, lose="scalars")
        tr.convert(root, tmp_path / lose, lose=lose)
        tr.convert(root, tmp_path / lose)
        assert tr.Run(tmp_path / lose).steps() == [10, 20]
    with pytest.raises(UnsupportedError, match=r"does not read its items dataset.*pass the path of an item"):
        tr.load(root / "10")
    for call in (tr.inspect, tr.open, tr.abstract):
        with pytest.raises(UnsupportedError, match="dataset"):
            call(root / "10")
    assert tr.load(root / "10" / "state")["w"].tolist() == [10, 10, 10]
    (root / "10" / "dataset" / "process_0-of-2.json").rename(root / "10" / "dataset" / "process_0-of-1.json")
    assert _metadata(root / "10")["dataset"] == {}
    shutil.rmtree(root / "10" / "dataset")
    config = root / "10" / "config" / "metadata"
    config.write_text('{"limit": Infinity}')
    with pytest.raises(UnsupportedError, match=r"(?s)^step 10 of .*: .*the item 'config' cannot be read: .*Infinity"):
        tr.convert(root, new)
    config.write_text('{"limit": 1}')
    tr.convert(root, new)
    assert _metadata(new / "step_00000010")["config"] == {"limit": 1}
    shutil.rmtree(root / "10" / "state")
    shutil.rmtree(root / "10" / "config")
    shutil.rmtree(root / "10" / "metrics")
    with pytest.raises(TreeringError, match=r"^step 10 of .* could not be converted: it has no item"):
        tr.convert(root, tmp_path / "another")
    assert tr.Run(tmp_path / "another").steps() == [20]


def test_metrics_that_are_no_numbers_stay_metadata(root: Path, tmp_path: Path) -> None:
    (root / "20" / "metrics" / "metrics").write_text('{"loss": NaN, "n": 3, "of": {"test": 1.5}, "ok": true}')
    tr.convert(root, tmp_path / "run")
    metrics = dict(tr.Run(tmp_path / "run").metrics(20))
    assert np.isnan(metrics.pop("loss"))
    assert metrics == {"n": 3}
    assert _metadata(tmp_path / "run" / "step_00000020")["metrics"] == {"of": {"test": 1.5}, "ok": True}
    assert tr.Run(tmp_path / "run").best("loss") == 10


def test_steps_by_any_name_and_without_a_time(root: Path, tmp_path: Path) -> None:
    (root / "10").rename(root / "ckpt_00000010")
    (root / "20").rename(root / "30.orbax-checkpoint-tmp")
    (root / "40").mkdir()
    (root / "events.out.5").write_bytes(b"none of its steps")
    step = root / "ckpt_00000010"
    (step / "_CHECKPOINT_METADATA").write_text("{}")
    os.utime(step / "_CHECKPOINT_METADATA", (1.7e9, 1.7e9))
    tr.convert(root, tmp_path / "run")
    assert tr.Run(tmp_path / "run").steps() == [10]
    assert _metadata(tmp_path / "run" / "step_00000010")["treering"]["saved"] == "2023-11-14T22:13:20.000000Z"
    os.utime(step / "_CHECKPOINT_METADATA", (1.7e9, 1.8e9))
    with pytest.raises(ExistsError, match="was made of another save of the step"):
        tr.convert(root, tmp_path / "run")
    shutil.copytree(step, root / "10")
    with pytest.raises(UnsupportedError, match="the steps '10' and 'ckpt_00000010' have one number"):
        tr.convert(root, tmp_path / "run")


def test_a_link_out_of_the_root_is_a_step_that_cannot_be_converted(root: Path, tmp_path: Path) -> None:
    shutil.move(root / "10", tmp_path / "outside")
    (root / "10").symlink_to(tmp_path / "outside")
    with pytest.raises(TreeringError, match=r"^step 10 of .* link that leads out"):
        tr.convert(root, tmp_path / "run")
    assert tr.Run(tmp_path / "run").steps() == [20]


def test_a_file_holds_one_step(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"is a run, and .* would hold one step; convert one of its steps"):
        tr.convert(root, tmp_path / "all.safetensors")
    tr.convert(root / "10", tmp_path / "one.safetensors", only="w")
    assert tr.load(tmp_path / "one.safetensors")["w"].tolist() == [10, 10, 10]
    with pytest.raises(NotFoundError):
        tr.convert(tmp_path / "nowhere", tmp_path / "new")


def test_in_memory_as_on_disk(tmp_path: Path) -> None:
    place = f"memory://{tmp_path.name}"
    copy_to_memory(GOLDEN, f"{place}/root")
    tr.convert(f"{place}/root", f"{place}/run")
    tr.convert(f"{place}/root", f"{place}/run")
    run = tr.Run(f"{place}/run")
    assert (run.steps(), run.best("loss")) == ([10, 20], 20)


def test_the_verbs_list_its_steps_as_those_of_a_run(root: Path) -> None:
    lines = inside("ls", str(root), code=0)[0].splitlines()
    assert [line.split() for line in lines] == [
        ["10", "2026-11-20", "23:33:52", "UTC", "16", "B", "loss", "0.1"],
        ["20", "2026-11-20", "23:33:52", "UTC", "16", "B", "loss", "0.05"],
    ]
    found = _json("ls", root)
    assert (found["form"], [step["path"] for step in found["steps"]]) == ("orbax", [f"{root}/10", f"{root}/20"])
    assert _json("log", root)["steps"][1]["metrics"] == {"loss": 0.1}
    assert "note: format: Orbax v0 step, OCDBT, zarr 2" in inside("log", str(root), code=0)[0]
    told = f"note: {str(root)!r} is a folder of steps of orbax; this is its latest step, 20\n"
    for verb in ("inspect", "du"):
        out, err = inside(verb, str(root), code=0)
        assert (err, "w" in out) == (told, True)
    assert inside("cat", str(root), "n", code=0) == ("20\n", told)
    (root / "10" / "state" / "_METADATA").write_text("{")
    assert "note: step 10 cannot be read: " in inside("log", str(root), code=0)[0]
    assert "is not a run" in inside("gc", str(root), code=2)[1]


def test_the_verb(root: Path, tmp_path: Path) -> None:
    inside("convert", str(root), str(tmp_path / "run"), "--only", "w", code=0)
    inside("convert", str(root), str(tmp_path / "run"), "--only", "w", code=0)
    assert _json("ls", tmp_path / "run")["steps"][0]["metrics"] == {"loss": 0.1}
    assert "--overwrite replaces it" in inside("convert", str(root), str(tmp_path / "run"), code=2)[1]


def test_an_older_step_is_not_taken_for_the_latest_one(root: Path) -> None:
    for name in ("state", "config", "metrics"):
        shutil.rmtree(root / "20" / name)
    for verb in (tr.load, tr.inspect, tr.abstract, tr.open):
        with pytest.raises(CorruptError, match="the latest step '20' has no item that treering reads"):
            verb(root)
    assert tr.load(root / "10")["w"].tolist() == [10, 10, 10]


_API = tr.load, tr.inspect, tr.verify, tr.abstract, tr.open, lambda path: tr.diff(path, path)
_LOOKS = ("inspect",), ("du",), ("verify",), ("ls", "**"), ("cat", "w")


@pytest.fixture
def step_of_items(root: Path) -> Path:
    """A step with a tree, an array, a random key, and an object of JSON."""
    step = root / "20"
    shutil.copytree(step / "state", step / "arr")
    shutil.copytree(step / "state", step / "key" / "jax_random_key")
    node = json.loads((step / "_CHECKPOINT_METADATA").read_bytes())
    node["item_handlers"] |= {"arr": "ArrayCheckpointHandler", "key": "JaxRandomKeyCheckpointHandler"}
    (step / "_CHECKPOINT_METADATA").write_text(json.dumps(node))
    return step


def test_arrays_and_random_keys_come_out_of_every_door(step_of_items: Path, root: Path) -> None:
    for path in (step_of_items, root):
        assert sorted(tr.load(path)) == ["arr", "key", "state"]
        for verb in _API:
            verb(path)
        for arguments in (("inspect",), ("du",), ("ls", "**")):
            out = inside(arguments[0], str(path), *arguments[1:], code=0)[0]
            assert all(name in out for name in ("arr", "key", "state"))
    assert inside("ls", str(root), code=0)[1].splitlines() == [
        "note: format: Orbax v0 step, OCDBT, zarr 2, the latest of a root's steps"
    ]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("lost", "others"),
    [
        pytest.param(lost, others, id=f"{lost}-{'beside others' if others else 'beside one alone'}")
        for lost, others in [
            *((lost, True) for lost in ("state/_METADATA", "arr/_METADATA", "key/jax_random_key/_METADATA")),
            *((lost, True) for lost in ("config/metadata", "arr", "key")),
            *((lost, False) for lost in ("state/_METADATA", "config/metadata", "key")),
        ]
    ]
    + [
        pytest.param(lost, False, id=f"{lost}-beside one alone", marks=pytest.mark.slow)
        for lost in ("arr/_METADATA", "key/jax_random_key/_METADATA", "arr")
    ],
)
def test_an_item_that_was_lost_is_named_at_every_door(
    step_of_items: Path, root: Path, tmp_path: Path, lost: str, others: bool
) -> None:
    item = lost.partition("/")[0]
    (shutil.rmtree if lost == item else os.unlink)(step_of_items / lost)
    if not others:
        kept = "state" if item != "state" else "arr"
        node = json.loads((step_of_items / "_CHECKPOINT_METADATA").read_bytes())
        for name in {"state", "arr", "key", "config", "metrics"} - {item, kept}:
            shutil.rmtree(step_of_items / name, ignore_errors=True)
            del node["item_handlers"][name]
        (step_of_items / "_CHECKPOINT_METADATA").write_text(json.dumps(node))
    for path in (step_of_items, root):
        for verb in _API:
            with pytest.raises(UnsupportedError, match=f"does not read its items {item};"):
                verb(path)
        for arguments in _LOOKS:
            assert f"does not read its items {item}\n" in inside(arguments[0], str(path), *arguments[1:], code=2)[1]
        with pytest.raises(UnsupportedError, match=item):
            tr.convert(path, tmp_path / f"from {path.name}")
    named = f"step 20: the item '{item}' is lost, or its metadata are, or it is of an unknown kind"
    for listing in ("ls", "log"):
        assert f"note: {named}\n" in "".join(inside(listing, str(root), code=0))
        assert named in _json(listing, root)["notes"]


def test_a_step_of_an_old_orbax_that_lost_its_tree_is_not_passed_over(root: Path) -> None:
    for name in ("10", "20"):
        (root / name / "_CHECKPOINT_METADATA").unlink()
        (root / name / "state").rename(root / name / "default")
    assert int(tr.load(root)["n"]) == 20
    for name in ("default/_METADATA", "config", "metrics"):
        path = root / "20" / name
        (shutil.rmtree if path.is_dir() else os.unlink)(path)
    for verb in (tr.load, tr.inspect, tr.abstract, tr.open):
        with pytest.raises(CorruptError, match="the latest step '20' has no item that treering reads"):
            verb(root)


def test_random_keys_and_iterators_of_a_step_are_read(root: Path) -> None:
    step = root / "10"
    shutil.copytree(step / "state", step / "key" / "jax_random_key")
    (step / "key" / "jax_random_key_metadata").mkdir()
    (step / "key" / "jax_random_key_metadata" / "metadata").write_text('{"typed": true}')
    (step / "data").mkdir()
    (step / "data" / "process_0-of-1.json").write_text('{"next": 7}')
    tree = tr.load(step)
    assert tree["key"]["w"].tolist() == tree["state"]["w"].tolist() == [10, 10, 10]
    assert _metadata(step)["data"] == {"next": 7}
    assert "note: key is the data of a random key" in str(tr.inspect(step))
    assert tr.verify(step).ok


class Loader:
    """Takes its state back as an iterator of grain does: of a DataLoader bytes of JSON, of a Dataset a dict."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("kind", ["DataLoader", "Dataset"])
def test_iterators_of_grain_go_on_in_the_run(root: Path, tmp_path: Path, kind: str) -> None:
    known = {"sampler": "IndexSampler()", "last_seen_indices": {"0": 31}} if kind == "DataLoader" else {}
    states: dict[int, Any] = {}
    for step in (10, 20):
        state = known | {"next": step, "parents": [{"seed": None, "rest": []}, 0.5, True, "text", {}]}
        text = json.dumps(state, indent=4)
        (root / str(step) / "data").mkdir()
        (root / str(step) / "data" / "process_0-of-1.json").write_text(text)
        states[step] = text.encode() if kind == "DataLoader" else state
    wanted = tr.load(root / "10")
    tr.convert(root, tmp_path / "run")
    run = tr.Run(tmp_path / "run")
    for step, state in states.items():
        like = {"state": wanted, "data": Loader(None)}
        found = run.load(step, like)
        assert found["data"] is like["data"]
        assert found["data"].state == state
        assert found["state"]["w"].tolist() == [step] * 3
        assert "data" not in _metadata(tmp_path / "run" / f"step_{step:08d}")
    resumed = run.load_or_init(lambda: {"state": wanted, "data": Loader(None)})
    assert (resumed.step, resumed.tree["data"].state) == (20, states[20])
    assert resumed.initialised == ()
    run.save(30, {"state": wanted, "data": resumed.tree["data"]}).result()
    assert tr.verify(run.path).ok
