"""A headless Chromium, and pages in it that note every error and every request that leaves this machine's files."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # other runs collect this folder too, and have no Playwright
    from playwright.sync_api import Browser, Page

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
# A container has no sandbox of its own; nothing else is asked of any network.
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@dataclasses.dataclass
class Watched:
    """A page, and what it has done that a page must not do."""

    page: Page
    """The page of Playwright."""
    errors: list[str]
    """Errors of its scripts, and what it wrote to the console as an error or a warning."""
    requests: list[str]
    """The addresses that it asked for, its own included."""

    def screenshot(self, name: str) -> Path:
        """Keep a picture of the whole page in ``build/screenshots``, where people look at it."""
        _SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = _SCREENSHOTS / f"{name}.png"
        self.page.screenshot(path=path, full_page=True)
        return path


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """The browser; ``TREERING_CHROMIUM`` names another one than that of the system."""
    from playwright.sync_api import sync_playwright

    path = os.environ.get("TREERING_CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.fail("no Chromium: install it (apt-get install chromium), or set TREERING_CHROMIUM to its path")
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=path, args=list(_FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[Callable[..., Watched]]:
    """Open an address: ``open_page(url, width=1440, dark=False, script=True)``."""
    contexts = []

    def open_(url: str, *, width: int = 1440, height: int = 900, dark: bool = False, script: bool = True) -> Watched:
        context = chromium.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            java_script_enabled=script,
        )
        contexts.append(context)
        watched = Watched(context.new_page(), [], [])
        watched.page.on("pageerror", lambda error: watched.errors.append(str(error)))
        watched.page.on("request", lambda request: watched.requests.append(request.url))
        watched.page.on(
            "console", lambda said: watched.errors.append(said.text) if said.type in {"error", "warning"} else None
        )
        watched.page.goto(url)
        return watched

    yield open_
    for context in contexts:
        context.close()
