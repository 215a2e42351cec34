"""Find links of built pages that lead nowhere: a page, a file or an anchor that is not there."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Anchors(HTMLParser):
    """Collects what a page can be asked for, and what it asks for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = {"", "top"}
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the anchors and the addresses of one element."""
        given = {name: value for name, value in attrs if value}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.links += [given[name] for name in ("href", "src", "data") if name in given and tag != "base"]


def dead_links(folder: Path, pages: Iterable[str]) -> list[str]:
    """Return ``page: link`` for each link of these pages of a folder that leads nowhere in the folder."""

    @cache
    def read(path: Path) -> _Anchors:
        return _Anchors(path.read_text(encoding="utf-8"))

    dead = []
    for page in (folder / name for name in sorted(pages)):
        for link in dict.fromkeys(read(page).links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            name = (
                posixpath.join(page.relative_to(folder).parent.as_posix(), unquote(parts.path)) if parts.path else None
            )
            target = folder / posixpath.normpath(name) if name else page
            target = target / "index.html" if target.is_dir() else target
            whole = target.is_file() and folder in target.parents
            if not whole or (target.suffix == ".html" and unquote(parts.fragment) not in read(target).anchors):
                dead.append(f"{page.relative_to(folder).as_posix()}: {link}")
    return dead
