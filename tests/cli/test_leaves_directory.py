"""Every verb on leaves directories: ours with and without prefixes, another program's, and both in one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treering as tr
from tests.command import HEAVY, imported_by, inside, treering
from tests.leaves.saved import put
from treering.leaves import tree_serialize_leaves

GOLDEN = Path(__file__).parents[1] / "compat" / "golden" / "eformer"
W = np.arange(24, dtype=np.float32).reshape(4, 6)


def ours(path: Path) -> Path:
    """Two prefixes beside a tree without one; one of them cut over a mesh and compressed."""
    model = {"w": put(W, P("x"), (2,)), "b": put(W[:, 0], P("x"), (2,)), "act": "gelu"}
    tree_serialize_leaves(path, model, prefix="model", compressor={"id": "zstd", "level": 3})
    tree_serialize_leaves(path, {"w": W, "none": None}, prefix="ema")
    tree_serialize_leaves(path, {"step": 7, "lr": jnp.float32(0.5), "note": "long " * 2000})
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ours(tmp_path_factory.mktemp("leaves") / "ckpt")


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Another program's directory with a prefix of ours in it."""
    path = Path(shutil.copytree(GOLDEN / "mixed_index", tmp_path / "mixed"))
    tree_serialize_leaves(path, {"w": W}, prefix="ours")
    return path


def said(verb: str, *arguments: object, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(inside(verb, *map(str, arguments), "--json", code=code)[0])
    return found


def test_prefixes_are_branches(whole: Path) -> None:
    lines = inside("inspect", str(whole), code=0)[0].splitlines()
    assert "form: leaves directory by treering, with checksums" in lines
    assert sum("tensorstore_index.json (" in line for line in lines) == 1
    branches = [line.split()[1] for line in lines if line[:1] in ("├", "└")]
    assert sorted(branches) == ["ema", "lr", "model", "note", "step"]
    kernel = next(line for line in lines if line.endswith("zstd") and "[4, 6]" in line)
    assert kernel.split("B  ")[1] == "P('x',)   2 of [2, 6], zstd"
    assert lines[-1].startswith("total: 8 leaves, ")


def test_programs_get_chunks_and_compressors(whole: Path) -> None:
    for verb in ("inspect", "ls"):
        found = said(verb, whole)
        assert (found["form"], found["verified"], found["unverified"]) == ("leaves", True, [])
        assert sorted(found["prefixes"]) == ["", "ema", "model"]
        leaves = {leaf["key"]: leaf for leaf in found["leaves"]}
        w = leaves["model/w"]
        assert (w["kind"], w["dtype"], w["shape"], w["nbytes"]) == ("jax", "float32", [4, 6], 96)
        assert (w["chunks"], w["chunk_shape"], w["offset"]) == (2, [2, 6], None)
        assert w["compressor"] == {"id": "zstd", "level": 3}
        plain = leaves["ema/w"]
        assert (plain["file"], plain["offset"], plain["kind"]) == ("ema/w/0.0", 0, "numpy")
        assert leaves["step"]["value"] == 7
    assert (whole / "ema/w/0.0").read_bytes() == W.tobytes()
    data = [file for file in whole.rglob("*") if file.is_file() and ".treering" not in file.parts]
    assert said("inspect", whole)["file_bytes"] == sum(file.stat().st_size for file in data)


def test_bytes_add_up(whole: Path) -> None:
    found = said("du", whole, "--depth", "1")
    shares = {share["key"]: share["nbytes"] for share in found["shares"]}
    assert shares == {"note": 10_000, "model/": 96 + 16 + 4, "ema/": 96, "step": 8, "lr": 4}
    assert sum(shares.values()) == found["total"]["nbytes"]
    line = inside("ls", str(whole), "model/w", code=0)[0]
    assert line.split() == ["model/w", "float32", "[4,", "6]", "96", "B"]
    assert "did you mean 'ema/w'" in inside("ls", str(whole), "ema/v", code=1)[1]


def test_cat(whole: Path) -> None:
    assert inside("cat", str(whole), "step", code=0)[0] == "7\n"
    assert inside("cat", str(whole), "model/act", code=0)[0] == "'gelu'\n"
    assert said("cat", whole, "model/w[1:3, -1]")["value"] == W[1:3, -1].tolist()
    assert said("cat", whole, "ema/w[0]")["value"] == W[0].tolist()
    assert said("cat", whole, "note")["value"] == "long " * 2000
    assert "is its first leaf" in inside("cat", str(whole), "model", code=2)[1]


def test_the_same_tree_in_another_form_is_the_same(whole: Path, tmp_path: Path) -> None:
    tr.save(tmp_path / "ckpt", tr.load(whole))
    assert not tr.diff(whole, tmp_path / "ckpt", values=True)
    assert inside("diff", str(whole), str(tmp_path / "ckpt"), "--values", code=0)[0].startswith("8 leaves, equal")
    tree_serialize_leaves(tmp_path / "other", {"w": W + np.eye(4, 6, dtype=np.float32), "none": 1}, prefix="ema")
    lines = inside("diff", str(whole), str(tmp_path / "other"), "ema", "--values", code=2)[1]
    assert "error" in lines
    found = {each["key"]: each for each in said("diff", whole, tmp_path / "other", "--values", code=1)["differences"]}
    assert found["ema/w"]["detail"] == "4 of 24 items differ, the first at [0, 0]"
    assert found["ema/none"]["what"] == "kind"
    assert found["step"]["b"] is None


def test_verify(whole: Path, copy: Path) -> None:
    assert inside("verify", str(whole), code=0)[0].startswith(f"'{whole}' is whole: 8 leaves, ")
    found = said("verify", whole)
    assert (found["ok"], found["checked"], found["note"], found["findings"]) == (True, True, None, [])
    chunk = copy / "ema/w/0.0"
    content = bytearray(chunk.read_bytes())
    content[40] ^= 1
    chunk.write_bytes(content)
    (copy / "model/b/1").unlink()
    lines = inside("verify", str(copy), code=1)[0].splitlines()
    assert lines[0] == f"'{copy}' is damaged: 2 findings"
    first, second = sorted(lines[1:])
    assert first == "  leaf 'ema/w' is damaged: bytes 0 to 96 of ema/w/0.0"
    assert second.startswith("  leaf 'model/b' lacks a chunk file: bytes 0 to ")
    assert second.endswith(" of model/b/1")
    (copy / "tensorstore_index.json").write_bytes(b"{")
    assert "tensorstore_index.json is damaged" in inside("verify", str(copy), code=1)[0]
    assert "tensorstore_index.json" in inside("ls", str(copy), code=1)[1]
    (copy / "tensorstore_index.json").unlink()
    for verb in ("verify", "ls", "inspect", "du"):
        assert "index_leaves" in inside(verb, str(copy), code=2)[1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["dtypes", "index_v1", "mixed_index", "plain", "prefixed", "sharded_2x4", "x64"])
def test_directories_of_another_program(name: str) -> None:
    path = GOLDEN / name
    found = said("ls", path)
    assert (found["form"], found["verified"], found["unverified"]) == ("leaves", False, found["prefixes"])
    assert {leaf["kind"] for leaf in found["leaves"]} == {"array"}
    wanted = json.loads((GOLDEN / f"{name}.expected.json").read_text())
    assert len(found["leaves"]) > 0
    assert wanted
    checked = said("verify", path)
    assert (checked["ok"], checked["checked"]) == (True, False)
    assert "another program" in checked["note"]
    assert "form: leaves directory, without checksums" in inside("inspect", str(path), code=0)[0]


def test_what_has_no_checksums_is_said(mixed: Path) -> None:
    text = inside("inspect", str(mixed), code=0)[0]
    assert "form: leaves directory by treering and others, with checksums of some leaves" in text
    assert "unverified: " in text
    found = said("ls", mixed)
    assert set(found["prefixes"]) - set(found["unverified"]) == {"ours"}
    kinds = {leaf["key"]: leaf["kind"] for leaf in found["leaves"]}
    assert kinds.pop("ours/w") == "numpy"
    assert set(kinds.values()) == {"array"}
    checked = said("verify", mixed)
    assert (checked["ok"], checked["checked"], checked["nbytes"]) == (True, False, 96)
    assert "everything else was checked" in checked["note"]
    text = inside("verify", str(mixed), code=0)[0]
    assert text.startswith(f"'{mixed}' is sound as far as it has checksums (")
    # Of what we wrote there every byte is checked all the same.
    (mixed / "ours/w/0.0").write_bytes(bytes(96))
    lines = inside("verify", str(mixed), code=1)[0].splitlines()
    assert lines[1] == "  leaf 'ours/w' is damaged: bytes 0 to 96 of ours/w/0.0"
    assert lines[2].startswith("  note: what is under ")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("verb", ["ls", "du", "inspect"])
def test_what_shows_headers_starts_without_numpy(verb: str, whole: Path) -> None:
    for path in (whole, GOLDEN / "sharded_2x4"):
        assert not imported_by(verb, str(path)) & HEAVY


@pytest.mark.sampled(2)
@pytest.mark.parametrize("arguments", [["verify"], ["cat", "ema/w"], ["diff", "--values"]])
def test_what_reads_arrays_starts_without_jax(arguments: list[str], whole: Path) -> None:
    verb, *more = arguments
    paths = [str(whole)] * (2 if verb == "diff" else 1)
    assert not imported_by(verb, *paths, *more) & {"jax", "jaxlib", "rich", "tensorstore"}


def test_it_starts_quickly(whole: Path) -> None:
    # Processor time, the best of five at most: on a busy machine the clock on the wall says little. 0.2 on a quiet one.
    seconds = []
    for _ in range(5):
        before = os.times()
        treering("ls", str(whole), code=0)
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
        if seconds[-1] < 0.6:
            break
    assert min(seconds) < 0.6
