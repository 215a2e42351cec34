"""An index as a listing: containers nested as the structure says, leaves with their records."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.format.indexes import keys_of
from treering._format.index import Chunks, Container, DataFile, ForeignKey, Index, LeafType, OpaqueLeaf, Token
from treering._format.listing import list_index
from treering._format.records import LeafRecord, Listing, Named
from treering._view.listing_json import json_lines, origin_members
from treering._view.nodes import branch_kind, leaves_of
from treering._view.rows import lay_out
from treering.errors import Corrupt

INT = LeafType(kind="int")
ARRAY = LeafType(kind="jax", dtype="bfloat16", shape=(2, 3), sharding="P('x')")
TEXT = LeafType(kind="str", dtype="uint8", shape=(5000,))


def index(structure: Sequence[Token], types: Sequence[LeafType], *, verified: bool = True) -> Index:
    """Make an index with one chunk for each stored leaf."""
    kinds = list(dict.fromkeys(types))
    stored = [number for number, kind in enumerate(types) if kind.stored]
    return Index(
        attempt="0" * 16,
        written={"by": "treering"},
        processes=1,
        meshes=("x=8 on 8 cpu devices",),
        structure=structure,
        keys=[str(number) for number in range(len(types))],
        types=kinds,
        leaf_types=[kinds.index(kind) for kind in types],
        values={number: number for number, kind in enumerate(types) if not kind.stored},
        chunks=Chunks(
            leaf=stored,
            box=[None] * len(stored),
            file=[0] * len(stored),
            offset=[4096 + 100 * number for number in stored],
            nbytes=[12] * len(stored),
            block=[65536] * len(stored),
        ),
        checksums=array("Q"),
        files=[DataFile(name="data", nbytes=5000, header=4096, digest=None)],
        replaces=(),
        metadata={},
        verified=verified,
    )


def listing(structure: Sequence[Token], types: Sequence[LeafType], *, verified: bool = True) -> Listing:
    return list_index(index(structure, types, verified=verified), form="checkpoint", files=(), file_bytes=1)


def container(node: str, *keys: Any, class_name: str | None = None) -> Container:
    return Container(node=node, keys=keys, class_name=class_name)


def test_containers_come_back_as_they_were() -> None:
    structure: list[Token] = [
        container("dict", "a", 5, "t"),
        container("list", 0, 1),
        1,
        container("dict"),
        1,
        container("tuple", 0, 1),
        container("namedtuple", "count", class_name="optax.State"),
        1,
        container("other", "w", class_name="nn.Dense"),
        1,
    ]
    root = listing(structure, [INT] * 4).root
    assert root == {"a": [0, {}], 5: 1, "t": ({"count": 2}, {"w": 3})}
    named, other = root["t"]
    assert isinstance(named, Named)
    assert (branch_kind(named), named.class_name) == ("namedtuple", "optax.State")
    assert (branch_kind(other), other.class_name) == ("other", "nn.Dense")


def test_leaves_have_their_records() -> None:
    root = listing([container("list", 0, 1, 2), 3], [ARRAY, INT, TEXT]).root
    assert root[0] == LeafRecord(
        kind="jax", dtype="bfloat16", shape=(2, 3), nbytes=12, offset=4096, file="data", sharding="P('x')", number=0
    )
    assert root[1] == 1
    assert (root[2].kind, root[2].dtype, root[2].shape, root[2].nbytes) == ("str", None, None, 5000)


def test_a_file_of_another_writer_says_less() -> None:
    found = listing([1], [ARRAY], verified=False)
    assert found.root.kind == "array"
    assert found.root.is_array
    assert not found.structured


def test_one_leaf_is_the_root() -> None:
    assert listing([1], [INT]).root == 0


@pytest.mark.parametrize(
    ("structure", "count"),
    [
        ([], 1),
        ([2], 2),
        ([1, 1], 2),
        ([container("list", 0, 1), 1], 1),
        ([container("list", 0), 2], 2),
        ([container("list", 0), 1], 2),
        ([container("list", 0), 1], 0),
        ([container("dict"), container("dict")], 0),
        ([container("dict", 1, True), 2], 2),
    ],
)
def test_a_structure_that_does_not_fit_is_damage(structure: list[Token], count: int) -> None:
    with pytest.raises(Corrupt):
        listing(structure, [INT] * count)


def test_a_thousand_levels() -> None:
    structure: list[Token] = [container("list", 0) for _ in range(1024)]
    node = listing([*structure, 1], [INT]).root
    for _ in range(1024):
        (node,) = node
    assert node == 0


names: st.SearchStrategy[Any] = (
    st.text(max_size=3) | st.integers(-3, 3) | st.booleans() | st.none() | st.binary(max_size=2)
)
names |= st.builds(ForeignKey, st.just("a.B"), st.text(max_size=2))


@st.composite
def structures(draw: st.DrawFn) -> tuple[list[Token], int]:
    def grow(levels: int) -> tuple[list[Token], int]:
        if not levels or draw(st.booleans()):
            return [1], 1
        node = draw(st.sampled_from(["dict", "list", "tuple", "namedtuple", "other"]))
        keys = draw(st.lists(names, max_size=3, unique_by=str))
        if node != "dict":
            keys = list(range(len(keys))) if node in {"list", "tuple"} else [f"f{n}" for n in range(len(keys))]
        elif len(set(keys)) != len(keys):
            keys = []
        tokens: list[Token] = [container(node, *keys, class_name="a.B")]
        leaves = 0
        for _ in keys:
            below, count = grow(levels - 1)
            leaves += count
            if isinstance(below[0], int) and isinstance(tokens[-1], int):
                tokens[-1] += below[0]
            else:
                tokens += below
        return tokens, leaves

    return grow(3)


@given(structures())
def test_key_texts_are_those_of_the_index(made: tuple[list[Token], int]) -> None:
    structure, count = made
    root = listing(structure, [INT] * count).root
    assert [key for key, _ in leaves_of(root)] == keys_of(structure)
    assert [leaf for _, leaf in leaves_of(root)] == list(range(count))


def test_json_names_classes_and_what_is_known_of_the_whole() -> None:
    import json

    found = listing([container("dict", "opt"), container("namedtuple", "n", class_name="optax.State"), 1], [ARRAY])
    lines = json_lines(lay_out(found.root), origin_members(found))
    document = json.loads("".join(lines))
    assert document["nodes"] == [{"key": "opt", "kind": "namedtuple", "class": "optax.State"}]
    assert (document["form"], document["verified"], document["meshes"]) == ("checkpoint", True, list(found.meshes))
    assert document["leaves"][0]["sharding"] == "P('x')"


def test_an_opaque_leaf_is_shown_by_its_text() -> None:
    made = index([1], [LeafType(kind="opaque")])
    made.values[0] = OpaqueLeaf("builtins.function", "gelu")  # type: ignore[index]
    root = list_index(made, form="checkpoint", files=(), file_bytes=1).root
    assert root == OpaqueLeaf("builtins.function", "gelu")
    assert lay_out(root).everything.nbytes == 0
