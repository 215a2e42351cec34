"""Checkpoints of versions 1 and 4 are read for ever, and written today as they were then."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treering
from tests.compat import independent_reader
from tests.compat.golden_checkpoints import GOLDEN, METADATA, PART, bits, save_shared, trees, whole_of_part

TREES = trees()
SPEC = Path(__file__).parents[2] / "docs" / "spec" / "checkpoint.md"


def flat(tree: Any) -> dict[str, Any]:
    """Leaves by path, None and functions among them."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)
    return {jax.tree_util.keystr(path): bits(leaf) for path, leaf in pairs}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TREES)
def test_they_are_read_into_the_tree_that_was_saved(name: str) -> None:
    tree = TREES[name]
    found = treering.load(GOLDEN / name, like=tree)
    assert flat(found) == flat(tree)
    assert str(jax.tree.structure(found)) == str(jax.tree.structure(tree))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [name for name in TREES if name not in ("containers", "python")])
def test_they_are_read_without_a_target(name: str) -> None:
    assert flat(treering.load(GOLDEN / name)) == flat(TREES[name])


@pytest.mark.parametrize("name", TREES)
def test_they_are_whole(name: str) -> None:
    assert treering.verify(GOLDEN / name)
    with treering.open(GOLDEN / name) as opened:
        assert opened.metadata == ({"run": "a"} if name == "example" else METADATA)


@pytest.mark.parametrize("name", [name for name in TREES if not name.endswith(".safetensors")])
def test_a_stranger_reads_them(name: str) -> None:
    _, found = independent_reader.read(GOLDEN / name)
    with treering.open(GOLDEN / name) as opened:
        assert len(found) == len(opened)
        arrays = {key: view.load() for key, view in opened.items() if hasattr(view, "load")}
    for key, value in arrays.items():
        if isinstance(value, jax.Array | np.ndarray) and not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            assert np.asarray(found[key]).tobytes() == np.asarray(value).tobytes()


def test_a_part_is_read_and_written_as_it_was(tmp_path: Path) -> None:
    whole = whole_of_part()
    wanted = {"layers": {1: whole["layers"][1]}, "pair": {"first": 7}}
    assert flat(treering.load(GOLDEN / "part")) == flat(wanted)
    assert "part: only=['layers/1', 'pair/first']" in str(treering.inspect(GOLDEN / "part"))
    treering.save(tmp_path / "part", whole, metadata=METADATA, only=PART)
    assert document(tmp_path / "part") == document(GOLDEN / "part")
    _, found = independent_reader.read(GOLDEN / "part")
    assert list(found) == ["layers/1/w", "layers/1/lora/0", "layers/1/lora/1", "pair/first"]


def document(path: Path) -> dict[str, Any]:
    """An index without what differs from save to save."""
    if path.is_dir():
        text = (path / "treering.json").read_text(encoding="ascii")
    else:
        content = path.read_bytes()
        size = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + size])
        text = header["__metadata__"]["treering.index"]
    members = json.loads(re.sub(r"data-[0-9a-f]{16}", "data-X", text))
    for value in members["values"] + [item for node in members["structure"] for item in statics(node)]:
        if isinstance(value, dict) and "text" in value:
            value.pop("digest", None)  # later versions write it, and every version reads what has none
    for name in ("digest", "attempt", "written"):
        del members[name]
    for file in members["files"]:
        del file["digest"]  # it covers the attempt in the header
    if not path.is_dir():
        del header["__metadata__"]["treering.index"]
        members["header"] = list(header.items())
    return members


def statics(node: Any) -> list[Any]:
    return list(node.get("static", {}).values()) if isinstance(node, dict) else []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in TREES if name != "single.safetensors"])
def test_they_are_written_as_they_were(tmp_path: Path, name: str) -> None:
    if name == "shared":
        save_shared(tmp_path / name)
    else:
        treering.save(tmp_path / name, TREES[name], metadata={"run": "a"} if name == "example" else METADATA)
    assert document(tmp_path / name) == document(GOLDEN / name)


def test_the_example_of_the_specification_is_one_of_them() -> None:
    page = SPEC.read_text(encoding="utf-8")
    written = (GOLDEN / "example" / "treering.json").read_text(encoding="ascii")
    assert f"```json\n{written}```" in page
    (data,) = (GOLDEN / "example").glob("data-*")
    assert data.name in page
    content = data.read_bytes()
    for part in re.findall(r"^(\d+)  ((?: ?[0-9a-f]{2})+)(?:  |$)", page, re.MULTILINE):
        offset, wanted = int(part[0]), bytes.fromhex(part[1])
        assert content[offset : offset + len(wanted)] == wanted
    header = content[8:4096].decode()
    shown = re.search(r"^8     (\{.*?), then spaces$", page, re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert "".join(line.strip() for line in shown[1].splitlines()) == header.rstrip()
