"""The page of ``treering report RUN --serve`` in a browser: a new step appears by itself, soon and without an error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import treering as tr
from treering._report.contents import gather
from treering._report.page import render
from treering._report.serve import FollowedReport, ReportServer, version_at

pytestmark = pytest.mark.browser


def test_a_new_step_appears_within_two_seconds_without_a_reload(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    path = str(tmp_path / "run")
    with tr.Run(path) as run, ReportServer(
        FollowedReport(lambda: gather(path), lambda found: render(found, live=True), lambda: version_at(path))
    ) as server:  # fmt: skip
        run.save(1, {"w": 1.5})
        run.wait()
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            watched = open_page(server.url)
            page = watched.page
            page.locator("main", has_text="step 1").wait_for()
            page.evaluate("window.stays = true")
            for step in (2345, 6789):
                run.save(step, {"w": 2.5, "more": 7})
                run.wait()
                page.locator("main", has_text=str(step)).wait_for(timeout=2000)
            assert page.evaluate("window.stays") is True
            page.wait_for_timeout(1500)  # it asks once more
            assert watched.errors == []
            assert all(url.startswith((server.url, "data:")) for url in watched.requests)
            watched.screenshot("report-served")
        finally:
            server.shutdown()
            thread.join()
