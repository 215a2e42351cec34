"""``treering report``: the page of every form, its sizes, and that nothing which a file says gets out of its text."""

from __future__ import annotations

import html.parser
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import treering as tr
from tests.command import here
from treering import leaves, serialization

TAGS = {
    *("html", "head", "meta", "link", "title", "style", "body", "main", "header", "section", "script", "div", "dl"),
    *("dt", "dd", "p", "h1", "h2", "b", "table", "thead", "tbody", "tr", "th", "td"),
}
SHAPES = (
    "<script>{}</script>",
    "</script><script>{}</script>",
    "<!--<script>{}",
    "--><script>{}</script>",
    "]]><script>{}</script>",
    "<img src=x onerror={}>",
    "'><svg onload={}>",
    '" onmouseover="{}" x="',
    "' autofocus onfocus={} x='",
    "</td></table><iframe srcdoc='{}'>",
    "<a href=javascript:{}>x</a>",
    "</title><script>{}</script>",
    "</style><script>{}</script>",
    "&lt;script&gt;{}&lt;/script&gt;",
    "{{{}}}",
)
ACTS = ("window.struck=1", "alert(1)", "fetch('http://127.0.0.1:1/')", "document.body.remove()")
ATTEMPTS = [shape.format(act) for shape in SHAPES for act in ACTS]
TREE: dict[str, Any] = {"w": np.arange(12.0).reshape(3, 4), "b": {"x": np.zeros(7, "i1")}, "step": 7}


class Strict(html.parser.HTMLParser):
    """Reads a page, and requires that it has our tags alone, and no handler."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts = 0
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS
        assert not [name for name, _ in attrs if name.startswith("on")]
        self.scripts += tag == "script"

    def handle_data(self, data: str) -> None:
        self.text += data


def report(path: object, output: Path, *options: str, code: int = 0) -> str:
    """Write a report and return its page."""
    here("report", str(path), "-o", str(output), *options, code=code)
    return output.read_text(encoding="utf-8")


def save_run(path: Path) -> None:
    with tr.Run(path, keep=tr.KeepLast(2)) as run:
        for step in (1, 2, 3):
            run.save(step, {**TREE, "step": step}, metrics={"loss": 1 / step})


FORMS = {
    "checkpoint": lambda path: tr.save(path, TREE),
    "run": save_run,
    "x.safetensors": lambda path: tr.save(path, {key: TREE[key] for key in ("w",)}),
    "x.msgpack": lambda path: serialization.save_to_file(TREE, path),
    "leaves": lambda path: leaves.tree_serialize_leaves(path, {"w": jnp.ones((2, 3))}, prefix="model"),
    "x.npz": lambda path: np.savez(path, w=TREE["w"]),
    "orbax": lambda path: tr.export(path, {"w": TREE["w"]}, to="orbax"),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_a_page(tmp_path: Path, form: str) -> None:
    FORMS[form](tmp_path / form)
    page = Strict(report(tmp_path / form, tmp_path / "report.html", "--stats", "--verify"))
    assert page.scripts == 2  # the data, and the one that draws
    assert "w" in page.text
    assert "mean" in page.text


def test_a_run_shows_its_history_and_a_step_what_changed(tmp_path: Path) -> None:
    save_run(tmp_path / "run")
    text = Strict(report(tmp_path / "run", tmp_path / "a.html")).text
    assert "KeepLast(2)" in text
    assert "0.5" in text
    step = tmp_path / "run" / "step_0000000"
    text = Strict(report(f"{step}3", tmp_path / "b.html", "--against", f"{step}2")).text
    assert "step" in text
    assert "another value" in text


def test_damage_is_shown_and_is_the_exit_code(tmp_path: Path) -> None:
    tr.save(tmp_path / "c", TREE)
    data = next((tmp_path / "c").glob("data-*"))
    data.write_bytes(data.read_bytes()[:-4] + b"\xff" * 4)
    text = Strict(report(tmp_path / "c", tmp_path / "a.html", "--verify", code=1)).text
    assert "damaged" in text


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_what_a_file_says_stays_text(tmp_path: Path, attempt: str) -> None:
    with tr.Run(tmp_path / "run") as run:
        run.save(
            1, {attempt: {"w": np.zeros(2), attempt: attempt}}, metrics={attempt: 1.0}, metadata={attempt: attempt}
        )
    page = Strict(report(tmp_path / "run", tmp_path / "a.html", "--stats", "--verify"))
    assert page.scripts == 2


def test_a_path_without_a_checkpoint_is_said(tmp_path: Path) -> None:
    here("report", str(tmp_path / "nothing"), "-o", str(tmp_path / "a.html"), code=2)
    assert not (tmp_path / "a.html").exists()
