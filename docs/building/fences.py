"""The fences of our own, such as ``{pages}``, become Markdown before Sphinx reads a page."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator

from building import reference
from building.pages import LIST, every_page, listed, present, source_of

_MADE = re.compile(r"^```\{(names|verbs|sections)\}\n```\n", re.MULTILINE)

# A heading over a list that turned out to be empty.
_EMPTY = re.compile(r"^##+ [^\n]+\n\s*(?=^##|\Z)", re.MULTILINE)


def shown_text(name: str, text: str) -> str:
    """Return the Markdown of a page with its fences written out.

    ``{pages}`` becomes a list of the pages that it names, each with its description, and they become a part of the
    toctree of this page; ``*`` stands for the pages of the folder that the page does not name elsewhere. ``{names}``
    becomes the list of all public names, ``{verbs}`` the help of the command line, and ``{sections}`` a toctree of the
    sections that there are.
    """
    made = {"names": reference.names, "verbs": reference.verbs, "sections": _sections}
    text = _MADE.sub(lambda fence: made[fence[1]](), text)
    here = posixpath.dirname(name)
    named: list[str] = []

    def write(fence: re.Match[str]) -> str:
        found = list(entries(here, text, fence[0]))
        named.extend(found)
        return "".join(_line(here, each) for each in found)

    written = _EMPTY.sub("", LIST.sub(write, text))
    tree = "\n".join(posixpath.relpath(entry, here or ".") for entry in named)
    return f"{written}\n```{{toctree}}\n:hidden:\n\n{tree}\n```\n" if named else text


def entries(here: str, text: str, fence: str) -> Iterator[str]:
    """Yield the names of the pages of one list of an index, those that ``*`` stands for included."""
    said = {name for name, _ in listed(here, text)}
    for entry, _ in listed(here, fence):
        if not entry.endswith("*"):
            yield entry
            continue
        for name in every_page():
            if posixpath.dirname(name) == posixpath.dirname(entry) and name not in said and not name.endswith("index"):
                yield name


def _sections() -> str:
    names = "\n".join(f"{section}/index" for section in present())
    return f"```{{toctree}}\n:hidden:\n\n{names}\n```\n"


def _line(here: str, name: str) -> str:
    page = every_page()[name]
    target = posixpath.relpath(name, here or ".") + source_of(name).suffix
    return f"- [{page.title}]({target}): {page.description}\n"
