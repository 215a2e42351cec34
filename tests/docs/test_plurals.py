"""No message says "1 leaves": a number with the noun that it counts is written by ``counted``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import treering

SOURCES = Path(treering.__file__).parent
NOUN = re.compile(
    r" (more )?(leaves|steps|saves|files|arrays|items|processes|bytes|blocks|folders|chunks|axes|levels|bits|keys|"
    r"layouts|values|children|containers|boxes|indices|differences|checksums|attempts|rows)\b"
)
NEVER_ONE = {
    ("branches.py", "waiting"),
    ("casts.py", "self.value.bit_length()"),
    ("cat.py", "size"),
    ("zstd.py", "found"),
    ("descriptors.py", "size"),
    ("doctor.py", "committed.processes"),
    ("document.py", "show(nbytes)"),
    ("errors.py", "len(path) - 16"),
    ("listings.py", "'with' if listing.verified else 'without'"),
    ("open.py", "value.bit_length()"),
    ("pieces.py", "size"),
    ("save_options.py", "suffix"),
    ("scan.py", "window.size"),
    ("columns.py", "show(length)"),
    ("columns.py", "show(node)"),
    ("tree_text.py", "len(leaf.processes)"),
}
"""Module and expression of what may stand before such a noun: no number, or one that is known to be larger than one."""


def numbers_with_nouns(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and expression of each ``{expression} nouns`` in an f-string; limits in capitals are no matter."""
    for text in ast.walk(tree):
        if isinstance(text, ast.JoinedStr):
            for value, after in zip(text.values, text.values[1:], strict=False):
                if isinstance(value, ast.FormattedValue) and isinstance(after, ast.Constant):
                    expression = ast.unparse(value.value)
                    if NOUN.match(str(after.value)) and not expression.strip("_").isupper():
                        yield value.lineno, expression


def test_every_number_before_a_noun_is_counted() -> None:
    bare = [
        f"{path.relative_to(SOURCES)}:{line}: {expression}"
        for path in sorted(SOURCES.rglob("*.py"))
        for line, expression in numbers_with_nouns(ast.parse(path.read_text()))
        if (path.name, expression) not in NEVER_ONE
    ]
    assert not bare


def test_a_bare_number_is_found() -> None:
    assert list(numbers_with_nouns(ast.parse("f'{len(found)} leaves differ'"))) == [(1, "len(found)")]
