"""What a report collects, and the page that it becomes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import treering as tr
from treering._cli.main import cli
from treering._report.contents import fold, gather
from treering._report.page import render
from treering._report.statistics import Summary


def _table(document: dict, name: str) -> dict:
    return next(each for each in document["tables"] if each["id"] == name)


def test_totals_and_leaves_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    tr.save(tmp_path / "ckpt", {"a": {"w": np.ones((3, 4), "float32")}, "step": 7})
    document = gather(tmp_path / "ckpt")
    assert document["leaves"]["keys"] == ["a/w", "step"]
    assert document["totals"]["nbytes"] == 56
    assert document["totals"]["parameters"] == 12


@pytest.mark.parametrize("name", ["state.safetensors", "state.msgpack", "state.npz"])
def test_single_files_have_a_page(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    tree: dict[str, Any] = {"w": np.arange(6, dtype="float32")}
    np.savez(path, **tree) if name.endswith("npz") else tr.save(path, tree)
    assert b"24 B" in render(gather(path, stats=True))


def test_statistics_are_those_of_numpy_over_several_blocks() -> None:
    values = np.concatenate([np.random.default_rng(0).normal(5, 2, 9000), [0.0, np.nan, np.inf, 1e6]])
    found = Summary()
    for start in range(0, len(values), 1000):
        found.add(values[start : start + 1000])
    good = values[np.isfinite(values)]
    assert (found.low, found.high) == (good.min(), good.max())
    assert found.mean == pytest.approx(good.mean())
    assert found.squares / found.finite == pytest.approx(good.var())
    assert (found.zeros, found.nans, found.infinite, sum(found.counts)) == (1, 1, 1, len(good))


def test_changes_say_by_how_much(tmp_path: Path) -> None:
    before = np.full(8, 2.0, "float32")
    after = before.copy()
    after[3] = 2.5
    tr.save(tmp_path / "a", {"same": before, "w": before})
    tr.save(tmp_path / "b", {"same": before, "w": after})
    told = _table(gather(tmp_path / "b", against=tmp_path / "a"), "changes")
    assert told["rows"] == [["w", "1 of 8 items", "", "", "0.5", "8.84%"]]


def test_a_damaged_leaf_is_named(tmp_path: Path) -> None:
    tr.save(tmp_path / "ckpt", {"w": np.arange(4096, dtype="float32")})
    (data,) = (tmp_path / "ckpt").glob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[-5] ^= 1
    data.write_bytes(content)
    document = gather(tmp_path / "ckpt", verify=True)
    assert document["damaged"] == ["w"]
    assert _table(document, "verification")["state"] == "bad"


def test_a_run_has_its_history(tmp_path: Path) -> None:
    with tr.Run(tmp_path / "run") as run:
        for step in (10, 20):
            run.save(step, {"w": 1.5}, metrics={"loss": 1.0 / step})
    document = gather(tmp_path / "run")
    assert document["step"] == 20
    assert document["history"]["steps"] == [10, 20]
    assert dict(document["history"]["series"])["loss"] == [0.1, 0.05]


def test_hostile_names_do_not_leave_their_place(tmp_path: Path) -> None:
    name = "</script><script>alert(1)</script><!--"
    tr.save(tmp_path / "ckpt", {name: 1.5}, metadata={name: name})
    page = render(gather(tmp_path / "ckpt")).decode()
    assert page.count("<script") == page.count("</script>") == 2
    assert "alert(1)</script>" not in page


@pytest.mark.parametrize(("leaves", "most"), [(10_000, 400_000), (200_000, 3_000_000)])
def test_many_leaves_make_a_small_page(tmp_path: Path, leaves: int, most: int) -> None:
    tree = {f"layer_{i // 10}": {f"kernel_{j}": i + j for j in range(10)} for i in range(0, leaves, 10)}
    tr.save(tmp_path / "ckpt", tree)
    document = gather(tmp_path / "ckpt")
    page = render(document)
    assert document["totals"]["leaves"] == leaves
    scripts = sum(map(len, re.findall(rb"<script>.*?</script>|<style>.*?</style>", page, re.DOTALL)))
    assert len(page) - scripts <= most
    rows = sum(document["leaves"]["nbytes"]) + sum(each[2] for each in document["folded"])
    assert rows == document["totals"]["nbytes"]


def test_folding_loses_no_leaf() -> None:
    kept, folded = fold([(f"a/{i}", i) for i in range(9)], 4)
    assert len(kept) + sum(totals.leaves for _, totals in folded) == 9


def test_the_verb_replaces_reports_alone(tmp_path: Path) -> None:
    tr.save(tmp_path / "ckpt", {"w": 1.5})
    other, page = tmp_path / "notes.html", tmp_path / "report.html"
    other.write_text("mine")
    ask = CliRunner().invoke
    assert ask(cli, ["report", str(tmp_path / "ckpt"), "-o", str(page)]).exit_code == 0
    assert ask(cli, ["report", str(tmp_path / "ckpt"), "-o", str(page)]).exit_code == 0
    assert ask(cli, ["report", str(tmp_path / "ckpt"), "-o", str(other)]).exception is not None
    assert other.read_text() == "mine"
