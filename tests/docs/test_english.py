"""Pages, help texts and public docstrings are plain technical English, as far as patterns can tell.

CONTRIBUTING.md says what is meant: the subject first, "you" for the reader, the term of the field, no aphorism.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import treering
from tests.command import here

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = ["checkpoint", "errors", "leaves", "rules", "run", "serialization", "sharding", "tree"]

SLIPS = {
    "a person as an agent": r"(?i)\b(nobody|somebody|whoever|anybody|everybody)\b",
    "a relative clause as a subject": r"(?:^|[.:;] )(?:Who|What) (?!is |are |do |does |can )[a-z]+ [^?]*$",
    "a signal that has its way": r"\bha(?:s|ve) (?:its|their) way\b",
    "a process on its feet": r"\bon (?:its|their) own feet\b",
    "a private word": r"\b(?:signs? of life|gone already|hand(?:s|ed)? in a part|made? anew|slip of the hand)\b",
    "an idiom": r"\b(?:without a word|waits? for ever|in the midst of|cannot be told(?! from))\b",
    "a negated noun": r"\b(?<!there )(?:is|are) no (?:array|leaf|run|step|text|number|folder|file|checkpoint|JSON)\b",
}
"""What a reader stumbles over, and the pattern that finds it."""


def slips(text: str) -> Iterator[str]:
    """Yield what is found in a text: the slip, and where."""
    for name, pattern in SLIPS.items():
        for found in re.finditer(pattern, text, re.MULTILINE):
            line = text[text.rfind("\n", 0, found.start()) + 1 :].partition("\n")[0]
            if not line.startswith("#"):
                yield f"{name}: {line.strip()[:120]}"


def prose(page: Path) -> str:
    """Return a page without its examples, the names in it and what programs print."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "`_`", text)


def docstrings(module: str) -> Iterator[str]:
    """Yield the docstrings of a public module and of the public names in it."""
    source = Path(importlib.import_module(f"treering.{module}").__file__ or "").read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and not getattr(node, "name", "").startswith(
            "_"
        ):
            text = ast.get_docstring(node) or ""
            yield "\n".join(line for line in text.splitlines() if not line.lstrip().startswith((">>>", "...")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages(page: Path) -> None:
    assert list(slips(prose(page))) == []


@pytest.mark.parametrize("module", MODULES)
def test_public_docstrings(module: str) -> None:
    assert [slip for text in docstrings(module) for slip in slips(text)] == []


def test_help_texts() -> None:
    text = here("--help", code=0).stdout
    verbs = re.findall(r"^  ([a-z]+) ", text.partition("Verbs:")[2], re.MULTILINE)
    assert len(verbs) >= 9
    helps = [text, *(here(verb, "--help", code=0).stdout for verb in verbs)]
    assert [slip for text in helps for slip in slips(" ".join(text.split()))] == []


@pytest.mark.parametrize(
    "text",
    [
        "Who has a template already says so with like=",
        "Nobody waits for ever",
        "the program saves and lets the signal have its way",
        "It is whole. What it lacks is made",
        "its process has left on its own feet",
        "the text is no JSON",
    ],
)
def test_a_slip_is_found(text: str) -> None:
    assert list(slips(text))


def test_plain_sentences_pass() -> None:
    assert not list(
        slips(f"treering {treering.__version__} saves what you pass. Every wait has a deadline; see what to do.")
    )
