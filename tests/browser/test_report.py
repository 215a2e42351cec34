"""The page of ``treering report`` in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import treering as tr
from treering._report.contents import gather
from treering._report.page import render

if TYPE_CHECKING:
    from tests.browser.conftest import Watched

pytestmark = pytest.mark.browser

_ATTACKS = [
    f"{start}{name}{i}"
    for i, name in enumerate(["hit()", "x onload=hit() ", "javascript:hit()", "<b>", "${hit()}", "\u202e"])
    for start in (
        "</script><script>hit()</script>", "<!--<script>", "<img src=x onerror=hit()>", "'\"><svg onload=hit()>",
        "]]>", "</title><script>hit()</script>", "</style><script>hit()</script>", "__proto__", "constructor",
        "\x00<iframe srcdoc='<script>parent.hit()</script>'>",
    )
]  # fmt: skip


@pytest.fixture
def page_of(tmp_path: Path, open_page: Callable[..., Watched]) -> Callable[..., Watched]:
    def open_(tree: object, *, metadata: dict | None = None, **options: object) -> Watched:
        tr.save(tmp_path / "ckpt", tree, metadata=metadata, overwrite=True)
        (tmp_path / "report.html").write_bytes(render(gather(tmp_path / "ckpt", stats="script" in options)))
        watched = open_page((tmp_path / "report.html").as_uri(), **options)
        if options.get("script", True):
            watched.page.evaluate("treeringReport.ready")
        return watched

    return open_


def _tree() -> dict:
    layers = {
        f"layer_{i}": {"kernel": np.zeros((64, 64 + i), "float32"), "bias": np.zeros(64, "int8")} for i in range(6)
    }
    return {"params": layers, "step": 7}


def test_search_sort_zoom_and_keys(page_of: Callable[..., Watched]) -> None:
    watched = page_of(_tree())
    page = watched.page
    page.fill("#search", "bias")
    assert page.locator("#leaves tbody tr").count() == 6
    page.fill("#search", "")
    page.click("#sort-key")
    assert page.locator("#leaves tbody th").first.inner_text() == "params/layer_0/bias"
    page.locator("#map button").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("#crumbs button").last.inner_text() == "params"
    before = page.evaluate("document.activeElement.title")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.title") != before
    page.keyboard.press("Escape")
    assert page.locator("#crumbs button").count() == 1
    assert watched.errors == []
    assert [url for url in watched.requests if not url.startswith(("file:", "data:"))] == []


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_the_screen(page_of: Callable[..., Watched], width: int, dark: bool) -> None:
    watched = page_of(_tree(), width=width, dark=dark)
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= width
    assert (watched.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)") is dark
    watched.screenshot(f"report-{width}-{'dark' if dark else 'light'}")
    watched.page.emulate_media(media="print")
    assert not watched.page.locator("#search").is_visible()
    assert watched.errors == []


def test_it_reads_without_script(page_of: Callable[..., Watched]) -> None:
    text = page_of(_tree(), script=False).page.inner_text("main")
    assert "params/layer_5/kernel" in text
    assert "17.2 KiB" in text


def test_hostile_names_run_nothing(page_of: Callable[..., Watched]) -> None:
    assert len(_ATTACKS) == 60
    watched = page_of(dict.fromkeys(_ATTACKS, 1.5), metadata={name: name for name in _ATTACKS})
    page = watched.page
    assert page.locator("#leaves tbody tr").count() == 60
    assert page.locator("main script, main img, main iframe").count() == 0
    assert watched.errors == []


@pytest.mark.parametrize(("leaves", "seconds"), [(10_000, 1.5), (200_000, 4.0)])
def test_many_leaves_open_soon(page_of: Callable[..., Watched], leaves: int, seconds: float) -> None:
    watched = page_of({f"l{i}": {f"k{j}": i + j for j in range(10)} for i in range(0, leaves, 10)})
    # The clock of a page begins with its navigation. The best of three: other tests may have the processors.
    drawn = [watched.page.evaluate("treeringReport.ready")]
    for _ in range(2):
        watched.page.reload()
        drawn.append(watched.page.evaluate("treeringReport.ready"))
    assert min(drawn) < 1000 * seconds, drawn
    assert watched.errors == []
