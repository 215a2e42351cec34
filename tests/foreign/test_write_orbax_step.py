"""Whole runs as roots of Orbax's steps, and folders of several items, as they lie on disk and as treering reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import treering as tr
from tests.command import inside
from treering.errors import ExistsError, MismatchError, UnsupportedError

GOLDEN = Path(__file__).parent / "golden" / "orbax"
ITEMS = {"params": "params", "state": "opt", "data": "grain:data", "config": "json:config"}


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    with tr.Run(tmp_path / "run") as made:
        for step in (1, 5, 10):
            tree = {"params": {"w": jnp.full(3, step)}, "opt": (np.ones(2), step), "data": {"next": [step, None, "a"]}}
            metrics = {"loss": float("nan") if step == 10 else 1 / step}
            made.save(step, tree, metrics=metrics, metadata={"git": "abc", "config": {"h": 4}})
    return tmp_path / "run"


def _json(*path: Any) -> Any:
    return json.loads(Path(*path).read_bytes())


def test_a_run_becomes_a_root(steps: Path, tmp_path: Path) -> None:
    tr.convert(steps, tmp_path / "root", to="orbax")
    assert sorted(place.name for place in (tmp_path / "root").iterdir()) == ["1", "10", "5"]
    step = tmp_path / "root" / "5"
    assert sorted(place.name for place in step.iterdir()) == [
        "_CHECKPOINT_METADATA", "commit_success.txt", "default", "metrics", "treering_conversion.json",
    ]  # fmt: skip
    assert _json(step, "metrics", "metrics") == {"loss": 0.2}
    facts = _json(step, "_CHECKPOINT_METADATA")
    assert facts["custom_metadata"] == {"git": "abc", "config": {"h": 4}}
    assert {name: handler.rpartition(".")[2] for name, handler in facts["item_handlers"].items()} == {
        "default": "StandardCheckpointHandler", "metrics": "JsonCheckpointHandler",
    }  # fmt: skip
    tr.convert(tmp_path / "root", tmp_path / "back")
    back, there = tr.Run(tmp_path / "back"), tr.Run(steps)
    assert back.steps() == there.steps()
    assert back.best("loss") == 5
    for number in (1, 5, 10):
        found, wanted = (
            tr.inspect(each.path / f"step_{number:08d}").metadata["treering"]["saved"] for each in (back, there)
        )
        assert found == wanted
        assert back.load(number)["params"]["w"].tolist() == [number] * 3


def test_it_goes_on_and_knows_another_run(steps: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    tr.convert(steps, root, to="orbax")
    made = {file: file.stat().st_ino for file in root.rglob("*")}
    shutil.rmtree(root / "5")
    tr.convert(steps, root, to="orbax")
    assert {file: file.stat().st_ino for file in made if "5" not in file.parts} == {
        file: node for file, node in made.items() if "5" not in file.parts
    }
    assert tr.load(root / "5")["opt"][1] == 5
    with pytest.raises(ExistsError, match="with other options; convert to another path; remove its folder"):
        tr.convert(steps, root, to="orbax", items={"state": ""}, overwrite=True)
    (root / "5" / "treering_conversion.json").unlink()
    with pytest.raises(ExistsError, match="its step 5 is none of the steps of"):
        tr.convert(steps, root, to="orbax")
    for other in (steps.parent / "item", GOLDEN / "ocdbt_zarr2", steps):
        if not other.exists():
            tr.export(other, {"a": np.ones(1)}, to="orbax")
        with pytest.raises((ExistsError, UnsupportedError)):
            tr.convert(GOLDEN / "manager", other, to="orbax")


def test_items_by_name(steps: Path, tmp_path: Path) -> None:
    tr.convert(steps, tmp_path / "root", to="orbax", items=ITEMS)
    step = tmp_path / "root" / "5"
    assert sorted(place.name for place in step.iterdir() if place.is_dir()) == [
        "config", "data", "metrics", "params", "state",
    ]  # fmt: skip
    assert _json(step, "config", "metadata") == {"h": 4}
    assert _json(step, "data", "process_0-of-1.json") == {"next": [5, None, "a"]}
    assert _json(step, "_CHECKPOINT_METADATA")["custom_metadata"] == {"git": "abc"}
    assert list(tr.load(step / "params")) == ["w"]
    tr.convert(tmp_path / "root", tmp_path / "back")
    tr.convert(tmp_path / "back", tmp_path / "again", to="orbax", items=ITEMS | {"state": "state"})
    for name in ("config/metadata", "data/process_0-of-1.json", "metrics/metrics"):
        assert (tmp_path / "again" / "5" / name).read_bytes() == (step / name).read_bytes()
    assert _json(tmp_path / "again" / "5", "_CHECKPOINT_METADATA")["custom_metadata"] == {"git": "abc"}


def test_the_state_of_a_loader_is_bytes(tmp_path: Path) -> None:
    text = json.dumps({"last_seen_indices": {"0": 31}}, indent=4).encode()
    with tr.Run(tmp_path / "run") as made:
        made.save(3, {"w": np.ones(2), "data": text})
    with pytest.raises(UnsupportedError, match="leaf 'data': a bytes"):
        tr.convert(tmp_path / "run", tmp_path / "root", to="orbax")
    tr.convert(tmp_path / "run", tmp_path / "root", to="orbax", items={"state": "w", "data": "grain:data"})
    assert (tmp_path / "root" / "3" / "data" / "process_0-of-1.json").read_bytes() == text
    tr.convert(tmp_path / "root", tmp_path / "back")
    assert tr.Run(tmp_path / "back").load(3)["data"] == text


def test_what_is_in_no_item_is_lost_by_name(steps: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="leaf 'opt/0': it is in none of the items params"):
        tr.convert(steps, tmp_path / "root", to="orbax", items={"params": "params"})
    with pytest.raises(UnsupportedError, match="a state of grain is JSON, or bytes alone, and has no jax"):
        tr.convert(steps, tmp_path / "root", to="orbax", items={"default": "", "data": "grain:params"})
    with pytest.raises(UnsupportedError, match="no member 'other' for the item 'config'"):
        tr.convert(steps, tmp_path / "root", to="orbax", items={"default": "", "config": "json:other"})
    with pytest.raises(MismatchError, match="nothing lies at 'other'"):
        tr.convert(steps, tmp_path / "root", to="orbax", items={"other": "other"})
    with pytest.raises(UnsupportedError, match="names no tree"):
        tr.convert(steps, tmp_path / "root", to="orbax", items={"data": "grain:data"})
    reserved = ("metrics", "d", "array_metadatas", "manifest.ocdbt", "commit_success.txt", "treering_conversion.json")
    for name in ("a/b", "..", "", ".a", *reserved):
        with pytest.raises(UnsupportedError, match="is no name of an item"):
            tr.convert(steps, tmp_path / "root", to="orbax", items={name: ""})
    with pytest.raises(UnsupportedError, match="names no item"):
        tr.convert(steps / "step_00000005", tmp_path / "root", to="orbax", items={})
    with pytest.raises(UnsupportedError, match="the form treering has no items"):
        tr.convert(steps, tmp_path / "root", items={"default": ""})
    assert not (tmp_path / "root").exists()
    tr.convert(steps, tmp_path / "root", to="orbax", items={"params": "params"}, lose="items")
    tr.convert(steps, tmp_path / "two", to="orbax", items={"a": "params", "b": ""})
    tr.convert(steps, tmp_path / "two", to="orbax", items={"b": "", "a": "params"})  # the same, in another order
    assert list(tr.load(tmp_path / "root" / "5")) == ["w"]


@pytest.mark.parametrize("member", [["a", "b"], {"loss": 5, "other": 2}])
def test_a_member_in_whose_place_the_metrics_are_is_refused(member: Any, tmp_path: Path) -> None:
    with tr.Run(tmp_path / "run") as run:
        run.save(1, {"w": np.ones(2)}, metrics={"loss": 0.5}, metadata={"metrics": member})
    with pytest.raises(UnsupportedError, match="the member 'metrics' of the metadata"):
        tr.convert(tmp_path / "run", tmp_path / "root", to="orbax")
    assert not (tmp_path / "root").exists()
    tr.convert(tmp_path / "run", tmp_path / "root", to="orbax", lose="metadata")
    assert _json(tmp_path, "root", "1", "metrics", "metrics") == {"loss": 0.5}


def test_members_that_stay_beside_the_metrics_are_no_loss(tmp_path: Path) -> None:
    with tr.Run(tmp_path / "run") as run:
        run.save(1, {"w": np.ones(2)}, metrics={"loss": 0.5}, metadata={"metrics": {"loss": 0.5, "other": 2}})
    tr.convert(tmp_path / "run", tmp_path / "root", to="orbax")
    assert _json(tmp_path, "root", "1", "metrics", "metrics") == {"loss": 0.5, "other": 2}


def test_an_empty_container_in_no_item_is_lost_by_name(tmp_path: Path) -> None:
    tr.save(tmp_path / "ckpt", {"p": {"w": np.ones(2), "in": {}}, "e": [{}]})
    with pytest.raises(UnsupportedError, match="the empty container 'e/0': it is in none of the items p") as caught:
        tr.convert(tmp_path / "ckpt", tmp_path / "step", to="orbax", items={"p": "p"})
    assert "'p/in'" not in str(caught.value)
    tr.convert(tmp_path / "ckpt", tmp_path / "step", to="orbax", items={"p": "p"}, lose="structure")
    tr.convert(tmp_path / "ckpt", tmp_path / "all", to="orbax", items={"p": "p", "e": "e"})


def test_containers_of_items_are_named_as_in_the_whole_tree(tmp_path: Path) -> None:
    tr.save(tmp_path / "ckpt", {"p": {"in": {1: np.ones(2)}}, "o": {1: np.ones(2)}})
    items = {"params": "p", "opt": "o"}
    with pytest.raises(UnsupportedError, match=r"the dict at 'p/in': its key 1 is no text\n  the dict at 'o': its"):
        tr.convert(tmp_path / "ckpt", tmp_path / "step", to="orbax", items=items)
    tr.convert(tmp_path / "ckpt", tmp_path / "step", to="orbax", items=items, lose=["p/**", "o"])


@pytest.mark.parametrize(
    ("state", "said", "lose"),
    [
        ({"next": float("nan")}, "a state of grain is JSON: the text is not JSON: NaN is not JSON", None),
        (b"\x00\xff", "a state of grain is JSON: the text", None),
        (b"{", "a state of grain is JSON: the text", None),
        ({1: 2}, "its key 1 is no text", "structure"),
    ],
)
def test_what_is_no_state_of_grain_is_lost_by_name(state: Any, said: str, lose: str | None, tmp_path: Path) -> None:
    with tr.Run(tmp_path / "run") as made:
        made.save(3, {"w": np.ones(2), "data": state})
    items = {"state": "w", "data": "grain:data"}
    with pytest.raises(UnsupportedError, match=said):
        tr.convert(tmp_path / "run", tmp_path / "root", to="orbax", items=items)
    assert not (tmp_path / "root").exists()
    if lose is not None:
        tr.convert(tmp_path / "run", tmp_path / "root", to="orbax", items=items, lose=lose)


def test_a_single_checkpoint_with_items(tmp_path: Path) -> None:
    tr.save(tmp_path / "ckpt", {"params": {"w": np.ones(2)}, "opt": [1, 2.5]}, metadata={"note": 1})
    tr.convert(tmp_path / "ckpt", tmp_path / "step", to="orbax", items={"params": "params", "state": "opt"})
    found = tr.load(tmp_path / "step")
    assert found["state"] == [1, 2.5]
    assert tr.inspect(tmp_path / "step").metadata == {"custom_metadata": {"note": 1}}


def test_a_bucket_is_refused_before_a_step_is_read(steps: Path) -> None:
    with pytest.raises(UnsupportedError, match="'memory://orbax/root' is in a bucket"):
        tr.convert(steps, "memory://orbax/root", to="orbax")


def test_on_the_command_line(steps: Path, tmp_path: Path) -> None:
    items = [part for name, key in ITEMS.items() for part in ("--item", f"{name}={key}")]
    inside("convert", str(steps), str(tmp_path / "root"), "--to", "orbax", *items, code=0)
    assert tr.load(tmp_path / "root" / "10" / "state")[1] == 10
    said = inside("convert", str(steps), str(tmp_path / "other"), "--to", "orbax", "--item", "params", code=2)
    assert "--item 'params' is not NAME=KEY" in str(said)
    twice = ("--item", "state=opt", "--item", "state=params")
    said = inside("convert", str(steps), str(tmp_path / "other"), "--to", "orbax", *twice, code=2)
    assert "--item names 'state' twice" in str(said)
