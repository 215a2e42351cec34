"""Every name of treering that docs, messages and docstrings give is there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import treering

ROOT = Path(__file__).parents[2]
NAME = re.compile(
    r"(?<![\w./@-])(?:treering|tr)((?:\.[A-Za-z_]\w*)+)(?![\w/])"
)  # schemas such as "treering.ls/1" are no names
PAGES = [page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts]
FILES = [*ROOT.glob("*.md"), *PAGES, *(ROOT / "src").rglob("*.py")]
NO_NAMES = {".json", ".index", ".readers", ".writers"}  # files, members of headers, groups of entry points
BEFORE = {
    ".at",
    ".sharding.Shardings",
    ".tree.uncompared",
    *(f".{name}" for name in treering._MOVED),
}  # for the changelog


def names(path: Path) -> set[str]:
    found = {match[1] for match in NAME.finditer(path.read_text(encoding="utf-8"))}
    return {name for name in found if not any(name == other or name.startswith(f"{other}.") for other in NO_NAMES)}


def is_there(name: str) -> bool:
    found: object = treering
    module = "treering"
    for part in name[1:].split("."):
        module = f"{module}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(module)
            except ImportError:
                return False
    return True


def test_every_name_is_there() -> None:
    given = {(path.relative_to(ROOT), name) for path in FILES for name in names(path)}
    told = {(Path(where), name) for where in ("CHANGELOG.md", "docs/design/api.md") for name in BEFORE}
    assert [f"{path}: treering{name}" for path, name in given - told if not is_there(name)] == []


@pytest.mark.parametrize("name", ["OpaqueLeaf", "ForeignKey"])
def test_what_load_gives_for_code_and_keys_is_public(name: str) -> None:
    assert name in treering.checkpoint.__all__
    assert getattr(treering.checkpoint, name)("m.C", "text").text == "text"


def test_a_name_that_is_lost_is_found() -> None:
    assert not is_there(".Nothing")
    assert not is_there(".errors.Nothing")
    assert is_there("._format.index.Index")
