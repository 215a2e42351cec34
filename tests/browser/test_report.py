"""The page of ``treering report`` in a browser: it works, asks nobody, runs nothing foreign, and is fast."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering as tr
from tests.report.pages import INJECTIONS, page_of, page_of_many

pytestmark = pytest.mark.browser
Open = Callable[..., Any]


def tree(scale: float = 1.0) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    blocks = {
        f"block_{place}": {
            "up": generator.normal(size=(64, 256)).astype(np.float32) * np.float32(scale),
            "down": generator.normal(size=(256, 64)).astype(np.float32),
            "norm": {"scale": np.ones(64, np.float16), "bias": np.zeros(64, np.float16)},
        }
        for place in range(6)
    }
    return {"params": blocks | {"embed": np.ones((1000, 64), np.float32)}, "counts": np.arange(900), "step": 7}


def write(path: Path, *options: str) -> str:
    page = path.with_suffix(".html")
    page.write_bytes(page_of(path, *options))
    return page.as_uri()


@pytest.fixture
def address(tmp_path: Path) -> str:
    tr.save(tmp_path / "checkpoint", tree(), metadata={"note": "of a test"})
    return write(tmp_path / "checkpoint")


def save_run(path: Path) -> None:
    with tr.Run(path) as run:
        for step in range(100, 900, 100):
            run.save(step, tree(step), metrics={"loss": 100 / step, "accuracy": 1 - 50 / step})


def ready(watched: Any) -> Any:
    watched.page.locator("#leaves tbody tr").first.wait_for()
    return watched.page


def require_quiet(watched: Any) -> None:
    assert watched.errors == []
    assert [url for url in watched.requests[1:] if not url.startswith("data:")] == []


def keys(page: Any) -> list[str]:
    found: list[str] = page.locator("#leaves tbody th").all_text_contents()
    return found


def test_search_and_sort_find_leaves(address: str, open_page: Open) -> None:
    watched = open_page(address)
    page = ready(watched)
    assert page.locator("#leaves tbody tr").count() == 27
    assert keys(page)[0] == "params/embed"
    page.fill("#search", "block_3 norm")
    assert sorted(keys(page)) == ["params/block_3/norm/bias", "params/block_3/norm/scale"]
    assert page.text_content("#found") == "2 leaves, 256 B"
    page.fill("#search", "")
    page.click("#sort-key")
    assert keys(page) == sorted(keys(page))
    page.click("#sort-key")
    assert keys(page) == sorted(keys(page), reverse=True)
    assert page.locator("th[data-name=key]").get_attribute("aria-sort") == "descending"
    require_quiet(watched)


def test_the_map_opens_by_mouse_and_by_keys(address: str, open_page: Open) -> None:
    watched = open_page(address)
    page = ready(watched)
    crumbs = page.locator("#crumbs button")
    page.locator("#map > button", has_text="params").focus()
    page.keyboard.press("Enter")
    assert crumbs.all_text_contents() == ["all leaves", "params"]
    first = page.evaluate("document.activeElement.node.key")
    assert first.startswith("params/")
    for key in ("ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement.node.key") != first
    assert page.locator("#map > button[tabindex='0']").count() == 1
    page.keyboard.press("Escape")
    assert crumbs.all_text_contents() == ["all leaves"]
    assert page.evaluate("document.activeElement.node.key") == "params"
    page.locator("#map > button", has_text="params").click(position={"x": 8, "y": 8})
    assert crumbs.count() == 2
    crumbs.first.click()
    assert crumbs.count() == 1
    require_quiet(watched)


def test_without_script_totals_and_rows_are_there(address: str, open_page: Open) -> None:
    page = open_page(address, script=False).page
    text = page.inner_text("main")
    assert "27" in text
    assert "params/block_5/norm/bias" in text
    assert page.locator("table").last.locator("tbody tr").count() == 27


def test_dark_and_print_have_colours_of_their_own(address: str, open_page: Open) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = open_page(address), open_page(address, dark=True)
    assert ready(light).evaluate(ground) != ready(dark).evaluate(ground)
    dark.page.emulate_media(media="print")
    assert dark.page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--ink')").strip() == "#000"
    assert not dark.page.locator("#search").is_visible()
    assert dark.page.locator("#leaves tbody tr").first.is_visible()
    require_quiet(light)
    require_quiet(dark)


def test_hostile_text_runs_nothing(tmp_path: Path, open_page: Open) -> None:
    tree: dict[str, Any] = {f"{place}{text}": place for place, text in enumerate(INJECTIONS)}
    tree |= {f"value {place}": text for place, text in enumerate(INJECTIONS)}
    tr.save(tmp_path / "bad", tree, metadata={text: text for text in INJECTIONS})
    watched = open_page(write(tmp_path / "bad"))
    page = ready(watched)
    assert page.locator("#leaves tbody tr").count() == 120
    for tile in page.locator("#map > button").all()[:3]:
        tile.hover()
    page.fill("#search", "onerror")
    page.wait_for_timeout(200)
    assert page.evaluate("window.hit") is None
    assert page.locator("main").locator("script, img, iframe, a, style, meta").count() == 0
    require_quiet(watched)


@pytest.mark.parametrize(("count", "seconds"), [(10_000, 1.5), (200_000, 4.0)])
def test_many_leaves_open_soon(tmp_path: Path, open_page: Open, count: int, seconds: float) -> None:
    path = tmp_path / "many.html"
    path.write_bytes(page_of_many(tmp_path, count))
    took = []
    for _ in range(3):
        watched = open_page(path.as_uri())
        page = ready(watched)
        page.evaluate("treeringReport.ready")
        took.append(page.evaluate("performance.getEntriesByName('drawn')[0].startTime"))
        require_quiet(watched)
    assert min(took) < seconds * 1000, took


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["checkpoint", "run"])
def test_pages_fit_their_screen(tmp_path: Path, open_page: Open, name: str, width: int, dark: bool) -> None:
    path = tmp_path / name
    if name == "run":
        save_run(path)
        address = write(path, "--stats", "--verify")
    else:
        tr.save(path, tree(), metadata={"note": "of a test"})
        tr.save(tmp_path / "before", tree(2.0))
        address = write(path, "--against", str(tmp_path / "before"))
    watched = open_page(address, width=width, dark=dark)
    page = ready(watched)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    watched.screenshot(f"report-{name}-{width}-{'dark' if dark else 'light'}")
    require_quiet(watched)
