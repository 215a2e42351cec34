"""Parts of a structure, held against a plain description; thousands of keys and renamings are looked up."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.checkpoint.test_selection import TREE
from tests.format.indexes import keys_of
from treering._format.index import Container, Token
from treering._format.selection import select
from treering._tree.flatten import flatten
from treering._tree.likeness import apply_renames
from treering._values.keys import split_key
from treering.errors import TreeringError

LAYERS = 5000
ONE: list[Token] = [Container(node="dict", keys=("b", "w")), 2]
STRUCTURE: list[Token] = [Container(node="list", keys=tuple(range(LAYERS))), *(ONE * LAYERS)]
KEYS = keys_of(STRUCTURE)


def test_two_thousand_exact_keys_are_looked_up() -> None:
    wanted = KEYS[::5]
    start = time.process_time()
    part = select(STRUCTURE, KEYS, at=None, only=wanted)
    assert time.process_time() - start < 1  # 10 s where each is compared with each
    assert list(part.keys) == wanted


def test_three_hundred_renamings_are_looked_up() -> None:
    renaming = {f"{layer}/w": f"{layer}/kernel" for layer in range(0, LAYERS, 5)} | {"7": "seven"}
    start = time.process_time()
    found = apply_renames(KEYS, renaming)
    assert time.process_time() - start < 1
    assert found == {wanted: saved for wanted, saved in renaming.items() if wanted != "7"} | {
        "7/b": "seven/b",
        "7/w": "seven/w",
    }


# ------------------------------------------------------------------------------------------ against a plain description


def test_a_selection_is_what_its_description_says() -> None:
    """For every key and branch: the leaves are those below it, the structure rebuilds, the keys are cut."""
    flat = flatten(TREE)
    branches = {"/".join(key.split("/")[:end]) for key in flat.keys for end in range(1, key.count("/") + 2)}
    for branch in sorted(branches):
        inside = [n for n, key in enumerate(flat.keys) if key == branch or key.startswith(f"{branch}/")]
        part = select(flat.tokens, flat.keys, at=branch, only=None)
        assert list(part.leaves) == inside
        above = split_key(branch)
        assert [above + split_key(key) for key in part.keys] == [split_key(flat.keys[n]) for n in inside]
        if "*" not in branch:
            kept = select(flat.tokens, flat.keys, at=None, only=branch)
            assert list(kept.leaves) == inside
            assert list(kept.keys) == [flat.keys[n] for n in inside]


def test_thousands_of_globs_and_leaves_take_no_square_of_time() -> None:
    tree = {f"layer{n}": {"kernel": n, "bias": n} for n in range(3000)}
    flat = flatten(tree)
    part = select(flat.tokens, flat.keys, at=None, only=[f"layer{n}/kernel" for n in range(60)])
    assert len(part.leaves) == 60
    deep: Any = 1
    for _ in range(900):
        deep = {"a": deep}
    flat = flatten(deep)
    part = select(flat.tokens, flat.keys, at=None, only="/".join(["**", "*a*"] * 20))
    assert list(part.leaves) == [0]
    with pytest.raises(TreeringError):
        select(flat.tokens, flat.keys, at=None, only="/".join(["**", "b"] * 20))
