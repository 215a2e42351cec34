"""The figures of docs/concepts are what their script draws; each is on a page, and says what it shows in words."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest
from building import twins

DOCS = Path(__file__).parents[2] / "docs"
DRAWN = {name: draw().svg() for name, draw in runpy.run_path(str(DOCS / "draw_concepts.py"))["FIGURES"].items()}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", DRAWN)
def test_the_committed_figure_is_what_the_script_draws(name: str) -> None:
    kept = (DOCS / "figures" / f"{name}.svg").read_text(encoding="utf-8")
    assert kept == DRAWN[name], "run python docs/draw_concepts.py"


@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_has_words_and_a_page(name: str) -> None:
    root = ElementTree.fromstring(DRAWN[name])
    assert root.findtext(f"{SVG}title")
    assert len(root.findtext(f"{SVG}desc") or "") > 100  # sentences, not a label
    pages = [page for page in DOCS.rglob("*.md") if f"figures/{name}.svg" in page.read_text(encoding="utf-8")]
    assert pages, f"no page shows {name}.svg"


@pytest.mark.parametrize("name", DRAWN)
def test_text_has_the_colour_of_the_page(name: str) -> None:
    assert re.findall(r"<text [^>]*fill=", DRAWN[name]) == []
    assert 'fill="currentColor"' in DRAWN[name]


def test_a_twin_has_the_words_of_a_figure_in_its_place() -> None:
    text = twins.markdown("concepts/commit")
    assert "**Figure: A commit is one rename.** Five moments of a save" in text
    assert "{raw}" not in text
