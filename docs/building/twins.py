"""The same pages as Markdown, one beside each built page, and ``llms.txt``, which lists them for programs that read."""

from __future__ import annotations

import html
import re
import shutil
from pathlib import Path

from building import reference, sidebar
from building.fences import shown_text
from building.pages import DOCS, every_page, present, source_of, text_of

_LINKED = ("figures", "maps")
"""Folders with files that twins link to."""
_FRONT_OR_TREE = re.compile(r"\A---\n.*?\n---\n|^```\{toctree\}\n.*?^```\n", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_FIGURE = re.compile(r"^```\{raw\} html\n:file: \.\./figures/([\w-]+\.svg)\n```$", re.MULTILINE)
_DOWNLOAD = re.compile(r"\{download\}`([^<`]+) <([^>`]+)>`")
# Cards and tabs become a list and paragraphs; what else is between colons only says how it looks.
_CARD = re.compile(r"^:::\{grid-item-card\} (.*)\n:link: (\S+)\n:link-type: doc\n", re.MULTILINE)
_TAB = re.compile(r"^:::\{tab-item\} (.*)$", re.MULTILINE)
_LOOKS = re.compile(r"^:(?:::.*|gutter: \d+)\n", re.MULTILINE)
_OTHER_SUFFIX = re.compile(r"(\]\([^):]*)\.(?:ipynb|rst)(?=[#)])")


def markdown(name: str) -> str:
    """Return a page as Markdown, without what only Sphinx understands."""
    path = source_of(name)
    if path.suffix == ".rst":
        return reference.markdown(name)
    text = _FIGURE.sub(_in_words, _FRONT_OR_TREE.sub("", shown_text(name, text_of(path))))
    text = _COMMENT.sub("", _DOWNLOAD.sub(r"[`\1`](\2)", text))
    text = _LOOKS.sub("", _TAB.sub(r"**\1**\n", _CARD.sub(r"- [\1](\2.md): ", text)))
    return _OTHER_SUFFIX.sub(r"\1.md", text).strip() + "\n"


def _in_words(fence: re.Match[str]) -> str:
    svg = (DOCS / "figures" / fence[1]).read_text(encoding="utf-8")
    title, told = (html.unescape(svg.partition(f"<{tag}>")[2].partition("<")[0]) for tag in ("title", "desc"))
    return f"**Figure: {title}.** {told}"


def index() -> str:
    """Return ``llms.txt``: what treering is, and a line for each page."""
    pages = every_page()
    lines = ["# treering", "", f"> {pages['index'].description}", ""]
    for section in present():
        listed = [pages[name] for _, names in sidebar.groups(section) for name in names]
        lines += [f"## {pages[f'{section}/index'].title}", ""]
        lines += [f"- [{page.title}]({page.name}.md): {page.description}" for page in listed]
        lines += [""]
    return "\n".join(lines)


def write_twins(folder: Path) -> None:
    """Write the twins and ``llms.txt`` into a folder of built pages."""
    for name in every_page():
        path = folder / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(markdown(name), encoding="utf-8")
    for linked in _LINKED:
        shutil.copytree(DOCS / linked, folder / linked, dirs_exist_ok=True)
    (folder / "llms.txt").write_text(index(), encoding="utf-8")
