"""The tabs of a page, and the list beside it: the pages of its section, under the headings of the section's index."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from building import reference
from building.fences import entries
from building.pages import LIST, every_page, present, source_of

_NAMES = "reference/api"
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)


@cache
def groups(section: str) -> list[tuple[str, list[str]]]:
    """Return the headings of the index of a section, each with the pages that its lists name."""
    text = source_of(f"{section}/index").read_text(encoding="utf-8")
    parts = _HEADING.split(text)
    found = zip(["", *parts[1::2]], parts[::2], strict=True)
    listed = (
        (heading, [name for fence in LIST.finditer(part) for name in entries(section, text, fence[0])])
        for heading, part in found
    )
    return [(heading, names) for heading, names in listed if names]


def section_of(name: str) -> str | None:
    """Return the section of a page: that whose index names it, which may be another than its folder."""
    for section in present():
        if name == f"{section}/index" or any(name in names for _, names in groups(section)):
            return section
    return "reference" if name.startswith(f"{_NAMES}/") else None


def tabs(name: str) -> list[dict[str, Any]]:
    """Return the tabs, of which the one with this page is the current one."""
    here = section_of(name)
    return [
        {"name": f"{section}/index", "title": every_page()[f"{section}/index"].title, "current": section == here}
        for section in present()
    ]


def sidebar(name: str, pathto: Callable[[str], str]) -> str:
    """Return the list beside a page as HTML; a page of no section has the sections there."""
    section = section_of(name)
    shown = groups(section) if section else [("", [f"{one}/index" for one in present()])]
    return "\n".join(line for heading, names in shown for line in _group(heading, names, name, pathto))


def _group(heading: str, names: list[str], here: str, pathto: Callable[[str], str]) -> Iterator[str]:
    if heading:
        yield f'<p class="caption"><span class="caption-text">{html.escape(heading)}</span></p>'
    yield "<ul>"
    for name in names:
        inside = here.startswith(f"{_NAMES}/") and name == _NAMES
        children = _siblings(here, pathto) if inside else ""
        yield _item(1, name, every_page()[name].title, here, pathto, children)
    yield "</ul>"


def _siblings(here: str, pathto: Callable[[str], str]) -> str:
    """Return the names of the module whose page this is."""
    module = reference.entries()[here.removeprefix(f"{_NAMES}/")].module
    names = [one for one in reference.entries().values() if one.module == module]
    lines = [_item(2, f"{_NAMES}/{one.path}", one.name, here, pathto, "") for one in names]
    return "<ul>" + "".join(lines) + "</ul>"


def _item(level: int, name: str, title: str, here: str, pathto: Callable[[str], str], children: str) -> str:  # noqa: PLR0917
    current = " current" if name == here or children else ""
    mark = ' aria-current="page"' if name == here else ""
    link = f'<a class="reference internal{current}" href="{pathto(name)}"{mark}>{html.escape(title)}</a>'
    return f'<li class="toctree-l{level}{current}">{link}{children}</li>'
