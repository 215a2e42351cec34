"""What each page is called, and what a reader finds there."""

from __future__ import annotations

import dataclasses
import html
import json
import posixpath
import re
from functools import cache
from pathlib import Path

DOCS = Path(__file__).parents[1]
TITLE = "treering"
SECTIONS = ("learn", "notebooks", "guides", "concepts", "reference", "project")
"""The folders that are tabs of the site, in order; one that has no index is left out."""
LIST = re.compile(r"^```\{pages\}\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
"""A list of pages in an index: a line for each, ``name: what a reader finds there``, or ``*`` for the others."""
_LONGEST_DESCRIPTION = 200
_FENCE = re.compile(r"^(```+|:::+).*?^\1$", re.DOTALL | re.MULTILINE)
_FRONT = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_SENTENCE = re.compile(r"(?<=[.?!])\s+(?=[A-Z`])")


@dataclasses.dataclass(frozen=True)
class Page:
    """A page of the site."""

    name: str
    """Its path below ``docs``, without suffix: ``guides/runs``."""
    title: str
    description: str
    """One sentence that says what the reader finds there."""


@cache
def every_page() -> dict[str, Page]:
    """Return the pages of the site by name, those that are made while it is built included."""
    found = [path for suffix in ("md", "rst", "ipynb") for path in DOCS.rglob(f"*.{suffix}")]
    names = {path.relative_to(DOCS).with_suffix("").as_posix(): path for path in found if _is_page(path)}
    pages = {name: read_page(name, path) for name, path in sorted(names.items())}
    for index in (path for name, path in names.items() if name.endswith("index")):
        for name, description in listed(index.parent.relative_to(DOCS).as_posix(), index.read_text(encoding="utf-8")):
            if description:
                pages[name] = dataclasses.replace(pages[name], description=description)
    return pages


def present() -> list[str]:
    """Return the sections that there are."""
    return [section for section in SECTIONS if f"{section}/index" in every_page()]


def listed(folder: str, text: str) -> list[tuple[str, str]]:
    """Return the pages that the lists of an index in this folder name, each with what it is said to be for."""
    lines = [line.partition(": ") for fence in LIST.finditer(text) for line in fence[1].splitlines() if line]
    return [(posixpath.normpath(posixpath.join(folder, name)), said.strip()) for name, _, said in lines]


def source_of(name: str) -> Path:
    """Return the file of a page."""
    return next(path for suffix in ("md", "rst", "ipynb") if (path := DOCS / f"{name}.{suffix}").exists())


def text_of(path: Path) -> str:
    """Return a page as Markdown; the cells of a notebook become text and fences."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    return "\n\n".join(f"```python\n{source}\n```" if kind == "code" else source for kind, source in cells) + "\n"


def read_page(name: str, path: Path) -> Page:
    """Read the title of a page and its description: that of its front matter, else its first sentence.

    What an index says of the page counts more.
    """
    text = text_of(path)
    if path.suffix == ".rst":  # one of ours: the title is its first line
        said = re.search(r"^   :description: (.*)$", text, re.MULTILINE)
        return Page(name, text.partition("\n")[0], said[1] if said else "")
    front = _FRONT.match(text)
    body = text[front.end() :] if front else text
    title = re.search(r"^# (.+)$", body, re.MULTILINE)
    said = re.search(r"^description: *(.+)$", front[1], re.MULTILINE) if front else None
    return Page(name, plain(title[1]) if title else name, said[1].strip("\"'") if said else _first_sentence(body))


def meta(description: str) -> str:
    """Return the element of a page's head that describes it."""
    return f'<meta name="description" content="{html.escape(description)}">'


def plain(text: str) -> str:
    """Return Markdown without links, roles and marks."""
    text = re.sub(r"\{[\w:-]+\}(?=`)", "", re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text))
    return " ".join(re.sub(r"[*`]", "", text).split())


def _is_page(path: Path) -> bool:
    return not {"_build", ".ipynb_checkpoints"} & set(path.parts)


def _first_sentence(text: str) -> str:
    paragraphs = (part.strip() for part in _FENCE.sub("", text).split("\n\n"))
    prose = next((part for part in paragraphs if part and part[0] not in "#`:|-<%!>+{("), "")
    sentence = plain(_SENTENCE.split(prose)[0]) if prose else ""
    return (
        sentence
        if len(sentence) <= _LONGEST_DESCRIPTION
        else f"{sentence[:_LONGEST_DESCRIPTION].rpartition(' ')[0]} ..."
    )
