"""Static fields and functions that differ from those that were saved are told of, however their texts are cut."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import treering
from tests.on_disk import signed_again
from treering.errors import StaticFieldsDifferWarning, UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore:A JAX array is being set as static")


def table(change: int) -> np.ndarray[Any, Any]:
    values = np.arange(5000)
    values[2500] += change
    return values


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Held:
    weight: Any
    table: Any = dataclasses.field(metadata={"static": True})


class Module(eqx.Module):
    weight: Any
    table: Any = eqx.field(static=True)


@jax.tree_util.register_pytree_node_class
class Custom:
    """A node whose aux data is an array."""

    def __init__(self, weight: Any, aux: Any) -> None:
        self.weight, self.aux = weight, aux

    def tree_flatten(self) -> tuple[tuple[Any], Any]:
        return (self.weight,), self.aux

    @classmethod
    def tree_unflatten(cls, aux: Any, children: tuple[Any]) -> Custom:
        return cls(*children, aux)


@dataclasses.dataclass(frozen=True)
class Config:
    names: tuple[str, ...]
    last: int


CASES: dict[str, Callable[[int], Any]] = {
    "an array": lambda change: Held(1.0, table(change)),
    "an array in a tuple": lambda change: Held(1.0, ("a", (table(change), 1))),
    "an array in a dict": lambda change: Held(1.0, {"a": [table(change)]}),
    "a field of equinox": lambda change: Module(1.0, table(change)),
    "aux data": lambda change: Custom(1.0, table(change)),
    "metadata of nnx": lambda change: nnx.state(nnx.Dict(p=nnx.Param(jnp.ones(2), table=table(change)))),
    "a dict of 200 keys": lambda change: Held(1.0, {f"key {n}": n for n in range(199)} | {"key 199": change}),
    "a list of 5000 items": lambda change: Held(1.0, table(change).tolist()),
    "a set": lambda change: Held(1.0, frozenset({f"item {n}" for n in range(200)} | {f"~{change}"})),
    "a configuration": lambda change: Held(1.0, Config(("name",) * 200, change)),
    "an opaque leaf": lambda change: functools.partial(max, *range(500), change),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


def told(path: Path, like: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        treering.load(path, like)
    return [str(each.message) for each in caught if each.category is StaticFieldsDifferWarning]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_a_change_that_the_text_does_not_show_is_told(name: str, path: Path) -> None:
    treering.save(path, {"x": CASES[name](0)})
    assert told(path, {"x": CASES[name](0)}) == []
    (line,) = told(path, {"x": CASES[name](1)})
    assert "x" in line


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_a_save_that_was_planned_before_has_the_new_digest(name: str, path: Path) -> None:
    treering.save(path, {"x": CASES[name](0)})
    treering.save(path, {"x": CASES[name](1)}, overwrite=True)
    assert told(path, {"x": CASES[name](1)}) == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_diff_tells_it_too(name: str, path: Path) -> None:
    for number in (0, 1):
        treering.save(path.with_name(str(number)), {"x": CASES[name](number)})
    (found,) = treering.diff(path.with_name("0"), path.with_name("1"))
    assert found.key.startswith("x")
    assert found.a != found.b


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_stand_ins_keep_the_digests(name: str, path: Path) -> None:
    treering.save(path, {"x": CASES[name](0)})
    treering.save(path, treering.load(path), overwrite=True)
    assert told(path, {"x": CASES[name](0)}) == []
    assert len(told(path, {"x": CASES[name](1)})) == 1


def test_leaves_directories_have_them_too(path: Path) -> None:
    treering.leaves.tree_serialize_leaves(path, {"x": Held(np.ones(2), table(0))})
    with pytest.warns(StaticFieldsDifferWarning, match="with the same text"):
        treering.leaves.tree_deserialize_leaves(path, target={"x": Held(np.ones(2), table(1))})


def rewrite_digests(path: Path, digest: str | None) -> None:
    """Give every static value in an index another digest, or none."""
    index = path / "treering.json"
    member = b"" if digest is None else f',"digest":"{digest}"'.encode()
    data, count = re.subn(rb',"digest":"xxh3-128/1:[0-9a-f]{32}"', member, index.read_bytes())
    assert count == 1
    index.write_bytes(signed_again(data))


def without_digests(node: Any) -> Any:
    if isinstance(node, dict):
        return {name: without_digests(value) for name, value in node.items() if name != "digest" or "text" not in node}
    return list(map(without_digests, node)) if isinstance(node, list) else node


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_where_a_digest_is_missing_texts_are_compared(name: str, path: Path) -> None:
    """As in checkpoints that were saved before there were digests."""
    treering.save(path, {"x": CASES[name](0)})
    rewrite_digests(path, None)
    document = (path / "treering.json").read_text(encoding="ascii")
    parsed = json.loads(document)
    assert without_digests(parsed) == parsed
    if name != "a set":  # whose text may end elsewhere
        assert told(path, {"x": CASES[name](1)}) == []
    assert set(treering.checkpoint.uncompared(treering.load(path)).values()) == {"it was saved without a digest"}


def test_digests_of_another_scheme_are_not_compared(path: Path) -> None:
    treering.save(path, {"x": Held(1.0, table(0))})
    rewrite_digests(path, "later/9:00")
    assert told(path, {"x": Held(1.0, table(0))}) == []


def test_digests_take_no_part_in_the_equality_of_keys() -> None:
    for kind in (treering.checkpoint.ForeignKey, treering.checkpoint.OpaqueLeaf):
        one, other = kind("m.C", "text", "s:1"), kind("m.C", "text", "s:2")
        assert one == other
        assert hash(one) == hash(other)


# ------------------------------------------------------------------------------------------------------- hidden arrays


WEIGHTS = (jnp.arange(3.0), np.arange(3.0))


def with_default(x: Any, w: Any = WEIGHTS[0]) -> Any:
    return x + w


def with_keyword(x: Any, *, w: Any = WEIGHTS[1]) -> Any:
    return x + w


def with_attribute(x: Any) -> Any:
    return x


with_attribute.weights = {"w": np.ones(2)}  # type: ignore[attr-defined]


def nested(x: Any, inner: Any = (with_default,)) -> Any:
    return inner[0](x)


@pytest.mark.parametrize(
    ("function", "place"),
    [(with_default, "w="), (with_keyword, "w="), (with_attribute, ".weights"), (nested, "inner=.w=")],
)
def test_arrays_in_defaults_and_attributes_are_refused(function: Any, place: str, path: Path) -> None:
    with pytest.raises(UnsupportedError, match=f"holds arrays where jax cannot see them, in '{place}'"):
        treering.save(path, {"f": function})
    assert not path.exists()


def test_a_root_of_another_class_is_told_as_such(tmp_path: Path) -> None:
    treering.save(tmp_path / "a", {"weight": 1.5})
    said = r"^classes, functions and static fields come from `like`.*:\n  \(the root\): saved as dict, like has .*Held$"
    with pytest.warns(StaticFieldsDifferWarning, match=said):
        treering.load(tmp_path / "a", like=Held(1.0, None))
