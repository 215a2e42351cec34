"""Thousands of exact keys and renamings: looked up, not compared with every leaf."""

from __future__ import annotations

import time

from treering._format.index import Container, Token
from treering._format.selection import select
from treering._format.structure import keys_of
from treering._tree.likeness import apply_renames

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
