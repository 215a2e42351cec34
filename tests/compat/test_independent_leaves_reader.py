"""A reader written from docs/spec/leaves.md alone reads leaves directories of then and now, and sees their damage."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treering
from tests import on_disk
from tests.compat import independent_leaves_reader as reader
from tests.compat.golden_checkpoints import bits
from tests.compat.golden_leaves import GOLDEN, ZSTD, branches, write
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves

SAVES = branches()
SPEC = Path(__file__).parents[2] / "docs" / "spec" / "leaves.md"


def flat(tree: Any) -> dict[str, Any]:
    """Leaves by path, None and functions among them."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)
    return {jax.tree_util.keystr(path): leaf for path, leaf in pairs}


def by_key(tree: Any) -> dict[str, Any]:
    """Leaves by key text, as a save has them."""
    leaves, structure = jax.tree_util.tree_flatten(tree, is_leaf=lambda leaf: leaf is None)
    with tempfile.TemporaryDirectory() as folder:
        treering.save(Path(folder) / "tree", tree)
        treering.save(Path(folder) / "numbers", jax.tree_util.tree_unflatten(structure, range(len(leaves))))
        with treering.open(Path(folder) / "tree") as opened, treering.open(Path(folder) / "numbers") as numbers:
            places: dict[str, Any] = dict(numbers)
            return {key: leaves[places[key]] for key in opened}


def raw(leaf: Any) -> Any:
    """An array as bytes, as a stranger sees them."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        host = np.asarray(leaf)
        return host.shape, host.tobytes()
    return bits(leaf)


def check_read(folder: Path, saves: dict[str | None, tuple[Any, dict[str, Any]]]) -> None:
    for prefix, (tree, _) in saves.items():
        _, found = reader.read(folder, prefix)
        wanted = by_key(tree)
        assert list(found) == list(wanted)
        for key, leaf in wanted.items():
            if callable(leaf):
                assert isinstance(found[key], tuple)  # its class and its text
            else:
                assert raw(found[key]) == raw(leaf), key


def test_the_reader_is_small_and_uses_nothing_of_treering() -> None:
    text = Path(reader.__file__).read_text(encoding="utf-8")
    assert len(text.splitlines()) < 150
    imported = {line.split()[1] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert not any(name.startswith("treering") for name in imported)
    assert {"json", "numpy", "xxhash", "zstandard", "tests.compat.independent_reader"} <= imported


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in SAVES if name != "containers"])
def test_a_stranger_reads_what_was_written_once_and_what_is_written_now(tmp_path: Path, name: str) -> None:
    check_read(GOLDEN / name, SAVES[name])
    write(tmp_path / name, SAVES[name])
    check_read(tmp_path / name, SAVES[name])


def test_a_stranger_reads_containers() -> None:
    tree, by_key = reader.read(GOLDEN / "containers")
    assert by_key["keys/a~1b"] == 1
    assert tree["ints"] == {3: 1, -(2**70): 2}
    assert tree["others"][0] == {(1, "b", (None, 2.5)): 1}
    assert np.array_equal(tree["others"][5]["\ud800"], np.zeros(1))
    assert tree["pair"] == {"first": 1, "second": [2]}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", SAVES)
def test_we_read_what_was_written_once(name: str) -> None:
    for prefix, (tree, _) in SAVES[name].items():
        found = tree_deserialize_leaves(GOLDEN / name, prefix=prefix, target=tree)
        assert {path: bits(leaf) for path, leaf in flat(found).items()} == {
            path: bits(leaf) for path, leaf in flat(tree).items()
        }
    assert treering.verify(GOLDEN / name)


def state(folder: Path) -> Any:
    """Everything in a directory, without what differs from save to save."""
    index = json.loads((folder / "tensorstore_index.json").read_text())
    attempts = {}
    for prefix, node in index["treering"].items():
        record = json.loads(node["record"])
        attempts[record["attempt"]] = f"attempt of {prefix!r}"
        for value in record["values"]:
            if isinstance(value, dict) and "text" in value:
                value.pop("digest", None)  # later versions write it, and every version reads what has none
        node["record"] = {name: value for name, value in record.items() if name not in ("digest", "attempt", "written")}
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in ("tensorstore_index.json", "record.json"):
            text = path.read_bytes()
            for attempt, shown in attempts.items():
                text = text.replace(attempt.encode(), shown.encode())
            files[str(path.relative_to(folder))] = text
    return index, files


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in SAVES if name != "arrays"])
def test_they_are_written_as_they_were(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, SAVES[name])
    (index, files), (old_index, old_files) = state(tmp_path / name), state(GOLDEN / name)
    assert index == old_index
    # Compressors may come to pack the same bytes otherwise.
    assert {path: data for path, data in files.items() if not path.startswith(("p/", "packed/"))} == {
        path: data for path, data in old_files.items() if not path.startswith(("p/", "packed/"))
    }


def test_a_flipped_byte_is_seen_by_a_stranger(tmp_path: Path) -> None:
    tree = {"a": np.arange(300), "s": "x" * 5000, "n": 7}
    tree_serialize_leaves(tmp_path / "d", tree, prefix="p", compressor=ZSTD)
    for file in sorted((tmp_path / "d").rglob("*")):
        if not file.is_file() or file.name == "record.json":
            continue
        good = file.read_bytes()
        for place in range(0, len(good), max(1, len(good) // 60)):
            file.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
            if b'"version"' in good[max(place - 24, 0) : place + 12]:
                continue
            with pytest.raises((AssertionError, ValueError, KeyError)):
                reader.read(tmp_path / "d", "p")
        file.write_bytes(good)
    reader.read(tmp_path / "d", "p")


def test_a_stranger_finds_staged_files(tmp_path: Path) -> None:
    """As they are between the two indexes of a save."""
    tree_serialize_leaves(tmp_path, {"w": np.arange(3), "v": np.arange(4)})
    path = tmp_path / "tensorstore_index.json"
    index = json.loads(path.read_bytes())
    (attempt,) = (tmp_path / ".treering").iterdir()
    (attempt / "leaves").mkdir()
    shutil.move(tmp_path / "w", attempt / "leaves" / "w")
    record = index["treering"][""]["record"]
    signature = on_disk.digest(record.encode(), b"\0w", b"\0v")
    index["treering"][""]["moving"] = {"cleared": ["w", "v"], "digest": signature}
    path.write_text(json.dumps(index))
    assert np.array_equal(reader.read(tmp_path)[1]["w"], np.arange(3))
    assert treering.verify(tmp_path) is not None
    assert np.array_equal(tree_deserialize_leaves(tmp_path)["w"], np.arange(3))


def test_the_example_of_the_specification() -> None:
    text = SPEC.read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:json|text)\n(.*?)```", text, re.DOTALL)
    index = json.loads((GOLDEN / "example" / "tensorstore_index.json").read_text())
    (node,) = index["treering"].values()
    assert node["record"] in blocks
    index["treering"]["model"]["record"] = "(below)"
    assert any(block.startswith("{") and _json(block) == index for block in blocks)
    for path in ("params/w", "params/layer%2E0"):
        zarray = (GOLDEN / "example" / "model" / path / ".zarray").read_text()
        assert any(zarray in block for block in blocks)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
