"""What a notebook shows: HTML that folds, with nothing in it that a file has written there; and parts for treescope."""

from __future__ import annotations

import html.parser
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import treescope
from hypothesis import given
from hypothesis import strategies as st

import treering as tr

TAGS = {"div", "style", "details", "summary", "b", "i", "span", "svg", "g", "polyline"}
ATTRIBUTES = {
    *("class", "style", "open", "width", "height", "role", "aria-label"),
    *("fill", "stroke", "stroke-width", "stroke-linecap", "points"),
}
EVIL = [
    "<script>x()</script>",
    '" onclick="x()',
    "'><img src=x>",
    "&lt;b&gt;",
    "\x1b[31m\u202e",
    "</details></div>",
    "表\u0301",
]


class Strict(html.parser.HTMLParser):
    """Reads a fragment, and requires that every tag and attribute is one of ours and that each tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS
        assert {name for name, _ in attrs} <= ATTRIBUTES
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def tree(name: str) -> dict[str, Any]:
    return {name: {"w": np.arange(6.0).reshape(2, 3), "n": 3}, "b": {name: name}}


VIEWS: dict[str, Callable[[Path], Any]] = {
    "open": lambda path: tr.open(path / "run" / "step_00000002"),
    "a leaf": lambda path: next(
        view for view in tr.open(path / "run" / "step_00000002").values() if not isinstance(view, str)
    ),
    "inspect": lambda path: tr.inspect(path / "run" / "step_00000002"),
    "a run": lambda path: tr.Run(path / "run"),
    "its status": lambda path: tr.Run(path / "run").status(),
    "verify": lambda path: tr.verify(path / "run"),
    "verify, damaged": lambda path: tr.verify(path / "damaged"),
    "diff": lambda path: tr.diff(path / "run" / "step_00000001", path / "run" / "step_00000002", values=True),
}


@pytest.fixture(scope="module", params=EVIL, ids=range(len(EVIL)))
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two steps, and a damaged checkpoint, whose keys, values, metrics and metadata are hostile."""
    folder, evil = tmp_path_factory.mktemp("outlines"), request.param
    with tr.Run(folder / "run") as run:
        run.save(1, tree(evil), metrics={f"loss{evil}": 0.5})
        run.save(2, {**tree(evil), f"{evil}2": 1}, metrics={f"loss{evil}": 0.25}, metadata={evil: evil})
    tr.save(folder / "damaged", tree(evil))
    data = next((folder / "damaged").glob("data-*"))
    data.write_bytes(data.read_bytes()[:-8] + b"\xff" * 8)
    return folder


@pytest.mark.filterwarnings("ignore:The chararray class:DeprecationWarning")  # treescope looks at all classes of numpy
@pytest.mark.parametrize("view", VIEWS)
def test_what_a_file_says_stays_text(place: Path, view: str) -> None:
    shown = VIEWS[view](place)
    assert Strict(shown._repr_html_()).text
    drawn = treescope.render_to_html(shown)
    assert "<script>x()" not in drawn
    assert "<img src=x" not in drawn
    if hasattr(shown, "close"):
        shown.close()


@given(st.dictionaries(st.text(max_size=12), st.integers(0, 9), min_size=1, max_size=6))
def test_any_key_is_text(tmp_path_factory: pytest.TempPathFactory, named: dict[str, int]) -> None:
    path = tmp_path_factory.mktemp("keys") / "c"
    try:
        tr.save(path, named)
    except tr.errors.TreeringError:  # no key of a tree
        return
    with tr.open(path) as found:
        Strict(found._repr_html_())


def test_a_closed_checkpoint_and_a_run_that_is_gone_show_something(tmp_path: Path) -> None:
    tr.save(tmp_path / "c", {"a": np.arange(3)})
    with tr.open(tmp_path / "c") as found:
        leaf = found["a"]
    assert "LeafView" in Strict(leaf._repr_html_()).text
    assert Strict(found._repr_html_()).text
    with tr.Run(tmp_path / "run") as run:
        run.save(1, {"a": 1}).result()
    shutil.rmtree(tmp_path / "run")
    assert "0 steps" in Strict(run._repr_html_()).text


def test_many_leaves_make_a_short_view(tmp_path: Path) -> None:
    tr.save(tmp_path / "c", {f"layer {n}": {f"w{m}": m for m in range(100)} for n in range(300)})
    with tr.open(tmp_path / "c") as found:
        text = found._repr_html_()
    assert len(text) < 100_000
    assert "and 200 more rows" in text


def test_metrics_are_drawn(place: Path) -> None:
    text = VIEWS["a run"](place)._repr_html_()
    assert text.count("<details") >= 1
    assert "step_00000002" in text or ">2<" in text


def test_damage_that_begins_at_the_first_byte_says_so(tmp_path: Path) -> None:
    tr.save(tmp_path / "c", {"a": np.arange(3)})
    data = next((tmp_path / "c").glob("data-*"))
    data.write_bytes(b"\xff" + data.read_bytes()[1:])
    found = tr.verify(tmp_path / "c")
    assert [each.start for each in found.findings] == [0]
    assert "<span class=right>0</span>" in found._repr_html_()
