"""strict=True: silent on equal trees, and every difference at once after any edits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.strategies import quick
from treering import serialization
from treering.errors import MismatchError

_LEAVES = st.one_of(
    st.builds(np.zeros, st.sampled_from([(2,), (3, 4), ()]), st.sampled_from(["float32", "int8"])),
    st.integers(0, 9),
    st.booleans(),
    st.text(max_size=2),
)
_NAMES = st.integers(0, 30).map("k{}".format)
_TREES = st.dictionaries(
    _NAMES, st.recursive(_LEAVES, lambda inner: st.dictionaries(_NAMES, inner, max_size=4), max_leaves=8), max_size=5
)


@dataclasses.dataclass(frozen=True, slots=True)
class Edit:
    """One change to one leaf of the saved tree."""

    path: tuple[str, ...]
    kind: str


def leaf_paths(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if not isinstance(tree, dict):
        yield path
        return
    for key, child in tree.items():
        yield from leaf_paths(child, (*path, key))


def edited(tree: dict[str, Any], edits: list[Edit]) -> dict[str, Any]:
    """A copy of ``tree`` with the edits made."""

    def copied(node: Any) -> Any:
        return {key: copied(child) for key, child in node.items()} if isinstance(node, dict) else node

    result: dict[str, Any] = copied(tree)
    for edit in edits:
        parent = result
        for key in edit.path[:-1]:
            parent = parent[key]
        key = edit.path[-1]
        match edit.kind:
            case "drop":
                del parent[key]
            case "add":
                parent[key + "_new"] = 1
            case "kind":
                parent[key] = b"bytes"
            case "shape":
                parent[key] = np.zeros(
                    (*np.shape(parent[key]), 7), np.asarray(parent[key]).dtype.kind.replace("U", "f")
                )
            case _:
                parent[key] = np.zeros(np.shape(parent[key]), np.complex64)
    return result


@quick(150)
@given(_TREES, st.data())
def test_every_edit_is_reported_once_and_nothing_else(target: dict[str, Any], data: st.DataObject) -> None:
    kinds = st.sampled_from(["drop", "add", "kind", "shape", "dtype"])
    edits = [Edit(path, data.draw(kinds)) for path in leaf_paths(target) if data.draw(st.booleans())]
    saved = serialization.to_bytes(edited(target, edits))
    if not edits:
        serialization.from_bytes(target, saved, strict=True)
        return
    with pytest.raises(MismatchError) as caught:
        serialization.from_bytes(target, saved, strict=True)
    differences = list(caught.value.differences)
    for edit in edits:
        shown = "/".join(edit.path) + ("_new" if edit.kind == "add" else "")
        about = [line for line in differences if line.startswith(f"{shown}:")]
        assert len(about) == 1, (edit, differences)
        differences.remove(about[0])
    assert differences == []


@quick(60)
@given(_TREES, _TREES)
def test_strict_passes_only_where_the_structure_is_the_same(target: dict[str, Any], saved: dict[str, Any]) -> None:
    data = serialization.to_bytes(saved)

    def told(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: told(child) for key, child in node.items()}
        return (type(node), getattr(node, "shape", None), getattr(node, "dtype", None))

    if told(target) == told(saved):
        serialization.from_bytes(target, data, strict=True)
    else:
        with pytest.raises(MismatchError) as caught:
            serialization.from_bytes(target, data, strict=True)
        assert caught.value.differences
