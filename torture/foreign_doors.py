"""Every door through which a file in the format of another program can come in, and a key map."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import treering
from torture.doors import Verdict, judge
from torture.foreign_images import Image
from torture.foreign_mutate import OUTSIDE, write_databases
from torture.foreign_writers import Liar
from treering._checkpoint.forms import FORMS, LOSSES
from treering._cli.main import main
from treering._keymap.key_rule import MapLeaf

__all__ = ["feed_image", "feed_map", "map_seeds", "warm_up"]

_MEMORY_FLOOR = 256 << 20
_LEAVES = (
    *(MapLeaf(f"layers.{n}.{name}.weight", (4, 6), "float32") for n in range(3) for name in ("q", "k", "v")),
    MapLeaf("embed.weight", (8, 4), "bfloat16"), MapLeaf("norm", (4,), "float32"), MapLeaf("step", None, None),
    MapLeaf("stacked", (3, 4, 6), "float32"), MapLeaf("empty", (0, 4), "float32"), MapLeaf("scalar", (), "int32"),
)  # fmt: skip
_SUFFIXES = {"safetensors": ".safetensors", "npz": ".npz", "flax": ".msgpack"}


def feed_image(image: Image, source: random.Random, folder: Path) -> Verdict:
    """Write a tree to disk, send it through a door picked by ``source``, and judge."""
    path = image.write(folder)
    door = source.choice(_DOORS)
    seen: list[Any] = []

    def enter() -> Any:
        found = door(path, source)
        seen.append(found)
        return found

    name = getattr(door, "__name__", "a door").removeprefix("_")
    verdict = judge(f"foreign: {name}", enter, image.nbytes, _MEMORY_FLOOR)
    if verdict.violation is None and seen and any(map(_is_from_outside, _arrays_in(seen[0]))):
        return Verdict(door=verdict.door, outcome=verdict.outcome, violation="read what lies outside of the tree")
    return verdict


def feed_map(data: bytes, folder: Path) -> Verdict:
    """Read a key map from a file, turn it round, and plan with it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    path = folder / "map.toml"
    path.write_bytes(data)

    def enter() -> None:
        found = treering.KeyMap.read(path)
        assert found.inverse().inverse().rules == found.inverse().inverse().inverse().inverse().rules
        assert repr(found)
        patterns = [pattern for rule in found.rules for pattern in rule.sources]
        found.plan(leaf for leaf in _LEAVES if any(pattern.match(leaf.key) for pattern in patterns))
        found.plan(_LEAVES)

    return judge("key map", enter, len(data))


def map_seeds() -> tuple[bytes, ...]:
    """Return key maps that fit some of what they are planned for."""
    return tuple(text.encode() for text in (*_MAPS, *(f"{each}{_OTHERS}" for each in _MAPS[2:])))


_OTHERS = """
[[rule]]
from = "s{name**}"
to = "others/{name**}"
"""
_MAPS = (
    _OTHERS,
    _OTHERS.replace('"s{', '"{'),
    """
[[rule]]
from = "layers.{i}.{name}.weight"
to = "layers/{name}/kernel"
stack = {i = 0}
transpose = [1, 0]
""",
    """
[[rule]]
from = ["layers.{i}.q.weight", "layers.{i}.k.weight", "layers.{i}.v.weight"]
to = "qkv/{i}"
merge = 0
sizes = [4, 4, 4]
""",
    """
[[rule]]
from = "stacked"
to = "one/{i}"
unstack = {i = 0}

[[rule]]
from = "embed.weight"
to = ["a", "b"]
split = 0
cast = ["bfloat16", "float32"]

[[rule]]
from = "norm"
drop = true
""",
    """
[[rule]]
from = "embed.weight"
to = "head"
copy = true

[[rule]]
from = "e{x**}"
to = "e/{x**}"
""",
)


# ---------------------------------------------------------------------------------------------------------------- doors


def _load(path: Path, source: random.Random) -> Any:
    """Load it; what it says from headers alone has to be the same tree."""
    del source
    tree = treering.load(path)
    shapes = [leaf for leaf in jax.tree.leaves(treering.abstract(path)) if isinstance(leaf, jax.ShapeDtypeStruct)]
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, np.ndarray | np.generic | jax.Array)]
    assert [array.shape for array in arrays] == [shape.shape for shape in shapes], "abstract and load differ"
    return tree


def _open(path: Path, source: random.Random) -> Any:
    """Open it, and read a part of each leaf, and the whole."""
    step = source.choice((None, 1, 2, 5, -1))
    found = []
    with treering.open(path) as opened:
        assert repr(opened)
        for key in opened:
            leaf = opened[key]
            assert repr(leaf)
            if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
                found += [leaf[tuple(slice(1, 9, step) for _ in leaf.shape)], leaf[...]]
    return found


def _inspect(path: Path, source: random.Random) -> None:
    del source
    listing = treering.inspect(path)
    str(listing).encode()
    assert repr(listing)
    assert listing._repr_html_()


def _abstract(path: Path, source: random.Random) -> None:
    del source
    assert repr(treering.abstract(path)) is not None


def _verify(path: Path, source: random.Random) -> None:
    del source
    found = treering.verify(path)
    assert found.ok or all(str(finding) for finding in found.findings)


def _diff(path: Path, source: random.Random) -> None:
    found = treering.diff(path, path, values=source.random() < 0.7)
    assert not len(found) or "nan" in str(found), f"it differs from itself: {found}"


def _convert(path: Path, source: random.Random) -> Any:
    to = source.choice(FORMS)
    target = path.parent / f"converted{_SUFFIXES.get(to, '')}"
    lose = source.choice(((), tuple(LOSSES)))
    treering.convert(path, target, to=to, lose=lose)
    return treering.load(target)


def _command(path: Path, source: random.Random) -> None:
    """Run a verb of the command line; its text has to be text."""
    verb = source.choice((["ls"], ["du"], ["inspect"], ["verify"], ["cat"]))
    keys = ["layers.0.w"] if verb == ["cat"] else []
    written = io.TextIOWrapper(io.BytesIO(), "utf-8")
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written), contextlib.suppress(SystemExit):
        main([*verb, str(path), *keys])
    written.flush()


_DOORS: tuple[Callable[[Path, random.Random], Any], ...] = (
    *[_load] * 5, *[_open] * 3, *[_inspect] * 2, _abstract, *[_verify] * 2, _diff, _convert, _command,
)  # fmt: skip


def _arrays_in(found: Any) -> list[Any]:
    leaves = found if isinstance(found, list) else jax.tree.leaves(found)
    return [np.asarray(leaf) for leaf in leaves if isinstance(leaf, np.ndarray | jax.Array) and not _is_key(leaf)]


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_from_outside(array: Any) -> bool:
    return OUTSIDE in array.tobytes()


def warm_up(seeds: Mapping[str, Image], folder: Path) -> None:
    """Read each undamaged tree once: what is imported and started then is not the next input's."""
    for image in seeds.values():
        treering.load(write_databases(image, Liar(random.Random(0), 0.0)).write(folder))
    jax.block_until_ready(jax.device_put(np.zeros(3, np.float32)))
