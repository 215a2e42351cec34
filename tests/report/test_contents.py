"""What a report says of each form, of a comparison, of the numbers in arrays, and of damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering as tr
from tests import buckets
from tests.command import imported_by, inside
from tests.report.pages import Parsed, document_in, document_of, page_of
from treering import serialization

GOLDEN = Path(__file__).parents[1] / "foreign" / "golden" / "orbax"


def tree(scale: float = 1.0) -> dict[str, Any]:
    return {
        "layer": {"w": np.arange(12, dtype=np.float32).reshape(3, 4) * np.float32(scale), "b": np.zeros(4, np.int8)}
    }


def save_run(path: Path) -> None:
    with tr.Run(path) as run:
        for step in (1, 2):
            run.save(step, tree(step), metrics={"loss": 1.0 / step})


def save_safetensors(path: Path) -> None:
    tr.save(path.parent / "source", tree())
    inside("convert", str(path.parent / "source"), str(path), code=0)


def save_huggingface(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    save_safetensors(path / "model.safetensors")
    shutil.rmtree(path / "source")


FORMS: dict[str, Callable[[Path], object]] = {
    "checkpoint": lambda path: tr.save(path, tree()),
    "run": save_run,
    "state.msgpack": lambda path: serialization.save_to_file(tree(), path),
    "state.safetensors": save_safetensors,
    "state.npz": lambda path: np.savez(path, **{"layer/w": tree()["layer"]["w"], "layer/b": tree()["layer"]["b"]}),
    "huggingface": save_huggingface,
    "leaves": lambda path: tr.leaves.tree_serialize_leaves(path, tree()),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_has_its_leaves_and_bytes_on_the_page(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    FORMS[name](path)
    page = page_of(path)
    document = document_in(page)
    assert document["totals"]["leaves"] == 2
    assert document["totals"]["nbytes"] == 52
    names = [
        key.replace("~1", "/").replace(".", "/") for key in document["leaves"]["keys"]
    ]  # of an npz a name is one part of a key
    assert dict(zip(names, document["leaves"]["nbytes"], strict=True)) == {"layer/w": 48, "layer/b": 4}
    text = Parsed(page).text
    assert name in text
    assert "52 B" in text
    assert "float32" in text


@pytest.mark.parametrize("name", ["v1_state", "manager", "ocdbt_zarr3"])
def test_checkpoints_of_orbax_are_shown(name: str) -> None:
    document = document_of(GOLDEN / name)
    assert document["totals"]["arrays"] > 0
    assert len(document["leaves"]["keys"]) == document["totals"]["leaves"]


def test_a_run_shows_its_history_and_its_latest_step(tmp_path: Path) -> None:
    save_run(tmp_path / "run")
    document = document_of(tmp_path / "run")
    assert document["step"] == 2
    assert document["history"]["steps"] == [1, 2]
    assert dict(document["history"]["series"])["loss"] == [1.0, 0.5]
    assert [row[0] for row in document["tables"][0]["rows"]] == ["2", "1"]


def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    _, err = inside("report", str(tmp_path / "run"), "-o", str(tmp_path / "out.html"), code=2)
    assert "could not read" in err
    assert not (tmp_path / "out.html").exists()


def test_against_shows_what_changed(tmp_path: Path) -> None:
    tr.save(tmp_path / "a", tree())
    tr.save(tmp_path / "b", tree(2.0) | {"more": 1})
    (changes,) = document_of(tmp_path / "b", "--against", str(tmp_path / "a"))["tables"]
    assert changes["id"] == "changes"
    told = repr(changes["rows"])
    assert "layer/w" in told
    assert "more" in told
    assert "layer/b" not in told


def test_stats_are_those_of_numpy(tmp_path: Path) -> None:
    values = np.array([0.0, 1.0, 2.0, 5.0, np.nan, np.inf], np.float32)
    tr.save(tmp_path / "a", {"w": values})
    (table,) = document_of(tmp_path / "a", "--stats")["tables"]
    (row,) = table["rows"]
    finite = values[np.isfinite(values)]
    assert row[:5] == ["w", "0", "5", f"{finite.mean():.4g}", f"{finite.std():.4g}"]
    assert row[5:8] == ["1", "1", "1"]
    assert max(row[8]["bars"]) == 99


def test_verify_shows_the_damaged_leaf_and_ends_with_1(tmp_path: Path) -> None:
    path = tmp_path / "a"
    tr.save(path, tree())
    assert "Verification: whole" in Parsed(page_of(path, "--verify")).text
    (data,) = path.glob("*.safetensors")
    raw = bytearray(data.read_bytes())
    at = raw.index(tree()["layer"]["w"].tobytes())
    raw[at + 5] ^= 1
    data.write_bytes(raw)
    page = page_of(path, "--verify", code=1)
    assert "1 finding" in Parsed(page).text
    assert document_in(page)["damaged"] == ["layer/w"]
    assert "damaged" not in document_of(path)


@pytest.mark.parametrize("missing", [False, True])
def test_damage_that_ends_a_table_is_a_note_in_its_place(tmp_path: Path, missing: bool) -> None:
    tr.save(tmp_path / "whole", tree())
    tr.save(tmp_path / "a", tree())
    (data,) = (tmp_path / "a").glob("*.safetensors")
    raw = bytearray(data.read_bytes())
    raw[raw.index(tree()["layer"]["w"].tobytes()) + 5] ^= 1
    data.unlink() if missing else data.write_bytes(raw)
    options = "--stats", "--against", str(tmp_path / "whole")
    tables = {one["id"]: one for one in document_of(tmp_path / "a", "--verify", *options, code=1)["tables"]}
    assert tables["verification"]["state"] == "bad"
    for name in ("changes", "statistics"):
        assert tables[name]["rows"] == []
        assert "not all could be read" in tables[name]["note"]
    # Damage that no verification has found, of the other one too, is an error.
    inside("report", str(tmp_path / "a"), *options, "-o", str(tmp_path / "out.html"), code=1)
    against = "--verify", "--stats", "--against", str(tmp_path / "a")
    inside("report", str(tmp_path / "whole"), *against, "-o", str(tmp_path / "out.html"), code=1)
    assert not (tmp_path / "out.html").exists()


def test_a_damaged_index_is_an_error_unless_verify_says_it_on_the_page(tmp_path: Path) -> None:
    tr.save(tmp_path / "a", tree())
    index = tmp_path / "a" / "treering.json"
    index.write_bytes(index.read_bytes()[:100])
    _, err = inside("report", str(tmp_path / "a"), "-o", str(tmp_path / "out.html"), code=1)
    assert "treering.json is damaged" in err
    assert not (tmp_path / "out.html").exists()
    document = document_of(tmp_path / "a", "--verify", code=1)
    assert document["notes"][0][0] == "damaged"
    assert document["tables"][0]["state"] == "bad"


def test_of_a_bucket_the_index_alone_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = buckets.install(monkeypatch)
    tr.save("memory://look/a", {"w": np.ones(1_000_000, np.float32)})
    before = bucket.received
    assert document_of("memory://look/a")["totals"]["nbytes"] == 4_000_000
    assert 0 < bucket.received - before < 20_000


def test_neither_jax_nor_numpy_is_started(tmp_path: Path) -> None:
    tr.save(tmp_path / "a", tree())
    found = imported_by("report", str(tmp_path / "a"), "-o", str(tmp_path / "out.html"))
    assert not found & {"jax", "jaxlib", "numpy", "tensorstore"}
