"""The page of ``treering report RUN --serve`` in a browser: a new step appears by itself, soon and without an error."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import treering as tr

pytestmark = pytest.mark.browser


def test_a_new_step_appears_within_two_seconds_without_a_reload(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    path = str(tmp_path / "run")
    with tr.Run(path) as run:
        run.save(1, {"w": 1.5})
        run.wait()
        command = [sys.executable, "-m", "treering", "report", path, "--serve"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                (url,) = re.findall(r"http://127\.0\.0\.1:\S+", server.stdout.readline())
                watched = open_page(url)
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
                assert all(asked.startswith((url, "data:")) for asked in watched.requests)
                watched.screenshot("report-served")
            finally:
                server.send_signal(signal.SIGINT)
        assert server.returncode == 0
