"""Every page of the built site in a real browser, on a narrow screen, light and dark: ``python3 dev.py browser``."""

from __future__ import annotations

import http.server
import re
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from building import links

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "docs" / "_build" / "html"
PARTS = 8
"""In how many parts the pages are looked at, so that two workers have as much to do each."""
KINDS = {
    "landing": "index.html",
    "index": "guides/index.html",
    "tutorial": "learn/tutorial.html",
    "guide": "guides/runs.html",
    "concept": "concepts/commit.html",
    "comparison": "project/comparison.html",
    "names": "reference/api.html",
    "function": "reference/api/treering.load.html",
    "verbs": "reference/verbs.html",
    "specification": "spec/checkpoint.html",
    "notebook": "notebooks/first-steps.html",
    "search": "search.html?q=preemption",
}

LOOK = Path(__file__).with_name("look.js").read_text(encoding="utf-8")
CONTRAST = Path(__file__).with_name("contrast.js").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site; ``dev.py browser`` has built it before."""
    if (BUILT / "index.html").exists():
        return BUILT
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "-n", "-q", "-b", "html", str(ROOT / "docs"), str(folder)]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture(scope="session")
def site(built: Path) -> Iterator[str]:
    """The address of a server of the built site on this machine."""

    class Server(http.server.SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # one connection for all that a page needs

        def __init__(self, *given: Any) -> None:
            super().__init__(*given, directory=str(built))

        def end_headers(self) -> None:
            self.send_header("Cache-Control", "max-age=3600" if "/_static/" in self.path else "no-store")
            super().end_headers()

        def log_message(self, *said: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def pages(built: Path) -> list[str]:
    """Name every page of the site that is none of those that only lead on."""
    found = sorted(built.rglob("*.html"))
    own = [path for path in found if 'http-equiv="refresh"' not in path.read_text(encoding="utf-8")]
    return [path.relative_to(built).as_posix() for path in own if "_static" not in path.parts]


STILL = "* { transition: none !important; animation: none !important }"


def test_other_sites_find_our_names(built: Path) -> None:
    head, body = (built / "objects.inv").read_bytes().split(b"zlib.\n")
    names = zlib.decompress(body).decode()
    assert b"Project: treering" in head
    assert "treering.save py:function 1 reference/api/treering.save.html#$" in names
    assert "treering.Run.load_or_init py:method 1 reference/api/treering.Run.html#$" in names


def test_pages_have_twins_and_a_list_for_programs(built: Path) -> None:
    own = [name for name in pages(built) if name not in {"genindex.html", "search.html"}]
    assert [name for name in own if not (built / name).with_suffix(".md").exists()] == []
    listed = re.findall(r"\]\(([\w./-]+)\)", (built / "llms.txt").read_text(encoding="utf-8"))
    assert len(listed) > 40
    assert [name for name in listed if not (built / name).exists()] == []


def test_links_of_twins_lead_to_twins(built: Path) -> None:
    twins = [(built / name).with_suffix(".md") for name in pages(built)]
    links_of = [
        (twin, re.findall(r"\]\(([\w./-]+\.(?:md|toml|svg|html))[)#]", twin.read_text(encoding="utf-8")))
        for twin in twins
        if twin.exists()
    ]
    assert sum(len(found) for _, found in links_of) > 300
    assert [f"{twin.name}: {to}" for twin, found in links_of for to in found if not (twin.parent / to).exists()] == []


def test_no_link_is_dead(built: Path) -> None:
    assert links.dead_links(built, [path.relative_to(built).as_posix() for path in built.glob("**/*.html")]) == []


BAD = """<!doctype html><html class="light"><head></head><body><h1>a</h1><h3>b</h3><img src="data:,">
<p style="color: #999; background: #fff">pale</p><p style="color: #444">dark</p><div style="width: 900px">wide</div>"""


def test_a_bad_page_is_told_apart(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    (tmp_path / "bad.html").write_text(BAD)
    page = open_page((tmp_path / "bad.html").as_uri(), width=390).page
    told = [each.partition(":")[0] for each in page.evaluate(LOOK)]
    assert told == ["scrolls sideways", "h3 after h1", "no alt", "no title", "descriptions", "no language"]
    (faint,) = page.evaluate(CONTRAST)
    assert "contrast 2.85" in faint
    assert "'pale'" in faint


@pytest.mark.parametrize("part", range(PARTS))
def test_pages(part: int, built: Path, site: str, open_page: Callable[..., Any]) -> None:
    names = pages(built)[part::PARTS]
    assert len(names) > 10
    watched = open_page(f"{site}/{names[0]}", width=390, height=844)
    failed: list[str] = []
    # What a page had not needed yet when the next one was opened is no failure.
    watched.page.on("requestfailed", lambda one: failed.append(one.url) if one.failure != "net::ERR_ABORTED" else None)
    watched.page.on("response", lambda response: failed.append(response.url) if response.status >= 400 else None)
    told = []
    for name in names:
        watched.page.goto(f"{site}/{name}")
        told += [f"{name}: {each}" for each in watched.page.evaluate(LOOK)]
        watched.page.add_style_tag(content=STILL)
        for scheme in ("light", "dark"):
            watched.page.evaluate("(scheme) => setColorMode(scheme)", scheme)
            told += [f"{name}, {scheme}: {each}" for each in watched.page.evaluate(CONTRAST)]
        told += [f"{name}: {each}" for each in (*watched.errors, *failed)]
        watched.errors.clear()
        failed.clear()
    told += [f"leaves the site: {url}" for url in watched.requests if not url.startswith(site)]
    assert not told, "\n".join(told)


def test_a_search_finds_the_page_about_it(site: str, open_page: Callable[..., Any]) -> None:
    watched = open_page(f"{site}/index.html")
    watched.page.fill(".sy-head-extra input[name=q]", "preemption")
    watched.page.keyboard.press("Enter")
    first = watched.page.wait_for_selector("ul.search li a")
    assert first.get_attribute("href").startswith("guides/preemption.html")
    assert watched.errors == []


def test_an_old_address_leads_to_the_same_place(site: str, open_page: Callable[..., Any]) -> None:
    watched = open_page(f"{site}/runs.html#which-steps-stay")
    watched.page.wait_for_url(f"{site}/guides/runs.html#which-steps-stay")
    plain = open_page(f"{site}/quickstart.html", script=False)
    plain.page.wait_for_url(f"{site}/learn/quickstart.html")


def test_the_reader_chooses_light_or_dark(site: str, open_page: Callable[..., Any]) -> None:
    watched = open_page(f"{site}/guides/runs.html", dark=True)
    assert watched.page.evaluate("document.documentElement.className") == "dark"
    watched.page.click("button.js-theme")
    assert watched.page.evaluate("document.documentElement.className") == "light"
    watched.page.goto(f"{site}/index.html")
    assert watched.page.evaluate("document.documentElement.className") == "light"


def test_a_tab_says_where_the_reader_is(site: str, open_page: Callable[..., Any]) -> None:
    page = open_page(f"{site}/spec/checkpoint.html").page
    assert page.text_content(".sy-head-links a[aria-current]") == "Reference"
    assert page.text_content(".globaltoc a[aria-current]") == "The checkpoint"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "dark"), [(390, False), (1440, True)], ids=["light", "dark"])
def test_a_picture_of_each_kind_of_page(
    kind: str, width: int, dark: bool, site: str, open_page: Callable[..., Any]
) -> None:
    watched = open_page(f"{site}/{KINDS[kind]}", width=width, dark=dark)
    if kind == "search":
        watched.page.wait_for_selector("ul.search li a")
    picture = watched.screenshot(f"site-{kind}-{width}-{'dark' if dark else 'light'}")
    assert picture.stat().st_size > 5_000
    assert watched.errors == []
