"""The page of ``treering report`` as a file: nothing of a checkpoint becomes markup, and it stays small."""

from __future__ import annotations

from pathlib import Path

import pytest

import treering as tr
from tests.command import inside
from tests.report.pages import INJECTIONS, Parsed, document_in, page_of, page_of_many
from treering import serialization

MARK = "<!doctype html><!-- a report of treering -->"

TAGS = {
    "html", "head", "meta", "link", "title", "style", "body", "main", "header", "p", "h1", "h2", "section", "dl", "div",
    "dt", "dd", "b", "table", "thead", "tbody", "tr", "th", "td", "script",
}  # fmt: skip
ATTRIBUTES = {"lang", "charset", "http-equiv", "content", "name", "rel", "href", "id", "class", "type"}


def require_ours(page: bytes) -> Parsed:
    parsed = Parsed(page)
    assert parsed.tags <= TAGS
    assert parsed.attributes <= ATTRIBUTES
    assert (parsed.scripts, parsed.comments) == (2, 1)
    assert page.count(b"<script") == page.count(b"</script") == 2
    assert page.count(b"<!--") == 1
    return parsed


def test_there_are_sixty_injections() -> None:
    assert len(set(INJECTIONS)) == 60


@pytest.mark.parametrize("text", INJECTIONS, ids=range(len(INJECTIONS)))
def test_no_text_of_a_checkpoint_becomes_markup(tmp_path: Path, text: str) -> None:
    path = tmp_path / "checkpoint"
    tr.save(path, {text: 1, "value": text}, metadata={text: text, "list": [text]})
    page = page_of(path)
    parsed = require_ours(page)
    assert "value" in parsed.text
    assert "\x1b" not in parsed.text
    assert "\u202e" not in parsed.text


@pytest.mark.parametrize("text", INJECTIONS[:12], ids=range(12))
def test_no_metric_or_note_of_a_run_becomes_markup(tmp_path: Path, text: str) -> None:
    with tr.Run(tmp_path / "run") as run:
        run.save(1, {"w": 1.5}, metrics={text.replace("\x00", ""): 1.0})
    require_ours(page_of(tmp_path / "run"))


def test_the_policy_of_the_page_allows_nothing_from_elsewhere(tmp_path: Path) -> None:
    serialization.save_to_file({"w": 1}, tmp_path / "a.msgpack")
    page = page_of(tmp_path / "a.msgpack").decode()
    assert page.startswith(MARK)
    assert "default-src 'none'" in page
    assert "connect-src 'none'" in page
    assert "unsafe" not in page
    assert "src=" not in page


def test_ten_thousand_leaves_are_at_most_400_kilobytes(tmp_path: Path) -> None:
    page = page_of_many(tmp_path, 10_000)
    assert len(document_in(page)["leaves"]["keys"]) == 10_000
    assert len(page) <= 400_000


def test_a_hundred_thousand_leaves_are_added_up_by_branch(tmp_path: Path) -> None:
    page = page_of_many(tmp_path, 100_000)
    document = document_in(page)
    rows = document["leaves"]
    assert len(rows["keys"]) == 50_000
    assert sum(leaves for _, leaves, _ in document["folded"]) == 50_000
    assert sum(rows["nbytes"]) + sum(nbytes for *_, nbytes in document["folded"]) == document["totals"]["nbytes"]
    assert len(page) <= 3_000_000
    assert "100,000 leaves" in Parsed(page).text


def test_a_file_that_is_no_report_is_kept(tmp_path: Path) -> None:
    path, output = str(tmp_path / "a.msgpack"), tmp_path / "out.html"
    serialization.save_to_file({"w": 1}, path)
    output.write_text("<p>mine</p>")
    _, err = inside("report", path, "-o", str(output), code=2)
    assert "is no report" in err
    assert output.read_text() == "<p>mine</p>"
    inside("report", path, "-o", str(output), "--overwrite", code=0)
    assert output.read_text().startswith(MARK)
    inside("report", path, "-o", str(output), code=0)  # a report makes room for a newer one
