"""The site: each page is listed and described, no published address dies, and dead links are found."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from building import fences, links, pages, published, reference, sidebar, twins

import treering
from tests.command import inside

PAGES = {name: page for name, page in pages.every_page().items() if not name.startswith("reference/api/")}


def shown(name: str) -> str:
    return fences.shown_text(name, pages.text_of(pages.source_of(name)))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_a_place_a_title_and_a_description(name: str) -> None:
    page = PAGES[name]
    assert page.title
    assert 20 <= len(page.description) <= 200, page.description
    assert name == "index" or sidebar.section_of(name), f"no index of a section names {name}"


def test_every_page_is_in_the_list_of_published_ones() -> None:
    assert published.unpublished() == [], "run python docs/building/published.py"


def test_every_published_address_is_a_page_or_leads_to_one() -> None:
    there = set(published.addresses())
    lost = [old for old, new in published.published().items() if (new or old) not in there]
    assert lost == [], "say in docs/published.txt where they are now: OLD -> NEW"


def test_a_redirect_leads_from_its_own_folder(tmp_path: Path) -> None:
    published.write_redirects(tmp_path)
    moved = {old: new for old, new in published.published().items() if new}
    assert len(moved) > 20
    for old, new in moved.items():
        target = links.dead_links(tmp_path, [old])
        assert {each.rpartition(": ")[2] for each in target} == {"../" * old.count("/") + new}


def test_every_public_name_has_a_page() -> None:
    public = [f"{name}.{each}" for name in ("treering", *(f"treering.{one}" for one in reference.MODULES))
              for each in importlib.import_module(name).__all__]  # fmt: skip
    plain = {"treering.__version__", "treering.checkpoint.Shardings", "treering.serialization.MAX_CHUNK_SIZE"}
    modules = {f"treering.{one}" for one in reference.MODULES}
    in_root = {f"{name}.{each}" for name in modules for each in treering.__all__}
    assert [one for one in public if one not in {*reference.entries(), *plain, *modules, *in_root}] == []
    listed = shown("reference/api")
    assert [path for path in reference.entries() if f"(api/{path}.rst)" not in listed] == []


def helped(*verb: str, heading: str) -> str:
    """What the help of a verb lists under a heading."""
    return inside(*verb, "--help", code=0)[0].split(f"\n{heading}:\n")[1].split("\n\n")[0]


VERBS = re.findall(r"^  (\w+) ", helped(heading="Verbs"), re.MULTILINE)


def test_the_help_lists_the_verbs() -> None:
    assert len(VERBS) >= 13
    assert {"cat", "convert", "verify"} < set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_of_a_verb_is_on_the_page_of_verbs(verb: str) -> None:
    section = shown("reference/verbs").split(f"\n## {verb}\n")[1].split("\n## ")[0]
    listed = re.findall(r"^  (?:(-\w), )?(--[\w-]+)", helped(verb, heading="Options"), re.MULTILINE)
    options = [name for names in listed if "--help" not in names for name in names if name]
    assert [name for name in options if name not in section] == []


def test_a_twin_has_no_words_for_sphinx_alone() -> None:
    for name in ("index", "guides/index", "reference/api"):
        text = twins.markdown(name)
        assert text.startswith("# ")
        assert "{toctree}" not in text
        assert "{pages}" not in text
        assert ".rst)" not in text


def test_programs_that_read_are_told_of_every_page() -> None:
    index = twins.index()
    assert index.startswith("# treering\n\n> ")
    assert [name for name in PAGES if not name.endswith("index") and f"]({name}.md): " not in index] == []


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here">1</a> <a href="b.html#not-here">2</a> <a href="c.html">3</a> <img src="x.png">'
        '<a href="#lost">4</a> <a href="https://example.org/x">5</a> <a href="../outside.html">6</a>'
    )
    (tmp_path / "b.html").write_text('<p id="here"><a href="a.html?q=1">back</a></p>')
    assert links.dead_links(tmp_path, ["a.html", "b.html"]) == [
        f"a.html: {link}" for link in ("b.html#not-here", "c.html", "x.png", "#lost", "../outside.html")
    ]
