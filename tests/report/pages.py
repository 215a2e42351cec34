"""Pages that ``treering report`` writes: large ones of what nobody saved, hostile ones, and what a parser finds."""

from __future__ import annotations

import base64
import html.parser
import json
import re
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.command import inside
from treering import serialization
from treering._format.listing import LeafRecord, Listing
from treering._report import contents

INJECTIONS = [
    f"{before}{body}{after}"
    for before, after in [("", ""), ('">', ""), ("</script>", "<!--"), ("</style>", "-->"), ("'>", "<script>")]
    for body in [
        "<script>window.hit = 1</script>",
        "<img src=x onerror='window.hit = 1'>",
        "<svg onload=window.hit=1>",
        "<iframe srcdoc='<script>parent.hit=1</script>'></iframe>",
        "<a href='javascript:window.hit=1'>x</a>",
        "<body onload=window.hit=1>",
        "<meta http-equiv=refresh content='0;url=http://example.invalid'>",
        "<style>@import url(http://example.invalid)</style>",
        "<!--<script>",
        "]]><b>&lt;script&gt;",
        "\u2028\u0000\x1b[31m\u202e<x onclick=window.hit=1>",
        "${window.hit=1}{{window.hit=1}}`;window.hit=1;//",
    ]
]


def list_many(count: int) -> Listing:
    """Give the headers of so many small arrays, in the tree of a model."""
    root: dict[str, Any] = {}
    for place in range(count):
        width = 16 + place * 7919 % 113
        leaf = LeafRecord(kind="jax", dtype="float32", shape=(width, 64), nbytes=width * 256, offset=0)
        root.setdefault(f"block_{place // 100}", {}).setdefault(f"layer_{place // 10 % 10}", {})[f"w_{place % 10}"] = (
            leaf
        )
    return Listing(form="safetensors", file_bytes=10**9, root=root)


def page_of(path: str | Path, *options: str, code: int = 0) -> bytes:
    """The page of a report."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        out, _ = inside("report", str(path), "-o", str(page), *options, code=code)
        assert "report of" in out
        return page.read_bytes()


def document_in(page: bytes) -> dict[str, Any]:
    """What a page has for its script."""
    (packed,) = re.findall(rb'<script id="data" type="application/octet-stream">([^<]+)</script>', page)
    document: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed)))
    return document


def document_of(path: str | Path, *options: str, code: int = 0) -> dict[str, Any]:
    """What the page of a report has for its script."""
    return document_in(page_of(path, *options, code=code))


def page_of_many(folder: Path, count: int) -> bytes:
    """The page of a file of so many arrays, whose headers are not read but made."""
    path = folder / "many.msgpack"
    serialization.save_to_file({"w": 1}, path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contents, "list_headers", lambda _: list_many(count))
        return page_of(path)


class Parsed(html.parser.HTMLParser):
    """The tags of a page, the names of their attributes, and its text."""

    def __init__(self, page: bytes) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.scripts = self.comments = 0
        self.text = ""
        self._within = ""
        self.feed(page.decode())
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.scripts += tag == "script"
        self._within = tag

    def handle_endtag(self, tag: str) -> None:
        self._within = ""

    def handle_comment(self, data: str) -> None:
        self.comments += 1

    def handle_data(self, data: str) -> None:
        if self._within not in {"script", "style"}:
            self.text += data
