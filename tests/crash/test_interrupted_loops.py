"""No interrupt leaves a block that holds a lock without its end."""

from __future__ import annotations

import ast
import dis
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import treering

SOURCES = sorted(Path(treering.__file__).parent.rglob("*.py"))

LEAKY = """
def fill(lock, items):
    with lock:
        for item in items:
            if item:
                print(item)
"""


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from codes(inner)


def locked_lines(text: str) -> set[int]:
    """The lines of all blocks whose `with` names a lock."""
    blocks = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.With))
    locked = (node for node in blocks if any("lock" in ast.unparse(item).lower() for item in node.items))
    return {line for node in locked for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)}


def uncovered_jumps(text: str) -> set[int]:
    """Lines of jumps back, at which Python looks for signals, that no handler covers though one covers their target.

    Python 3.13 makes them of a condition at the end of a loop. An interrupt there skips `__exit__` and ``finally``.
    """
    found = set()
    for code in codes(compile(text, "text", "exec")):
        table = dis._parse_exception_table(code)  # type: ignore[attr-defined]
        for one in dis.get_instructions(code):
            if one.opname.startswith("JUMP_BACKWARD") and not one.opname.endswith("NO_INTERRUPT"):
                covers = [any(entry.start <= at < entry.end for entry in table) for at in (one.offset, one.argval)]
                if covers == [False, True] and one.positions is not None:
                    found.add(one.positions.lineno or 0)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_block_that_holds_a_lock_has_a_loop_that_an_interrupt_leaves_past_its_end(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert uncovered_jumps(text) & locked_lines(text) == set()


def test_lines_under_a_lock_are_found() -> None:
    assert locked_lines(LEAKY) == {4, 5, 6}
    assert uncovered_jumps(LEAKY) <= {5}
