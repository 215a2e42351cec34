"""The browser of these tests notices what the others rely on it to notice."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser


def test_errors_and_requests_of_a_page_are_noted(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><img src='other.png'><script>console.error('told'); throw Error('thrown')</script>")
    watched = open_page(page.as_uri())
    watched.page.wait_for_load_state()
    assert any("told" in error for error in watched.errors)
    assert any("thrown" in error for error in watched.errors)
    assert any(url.endswith("other.png") for url in watched.requests)


def test_a_page_without_script_runs_none(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><p id='p'>before</p><script>document.getElementById('p').textContent='x'</script>")
    assert open_page(page.as_uri(), script=False).page.text_content("#p") == "before"
