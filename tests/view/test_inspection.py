"""treering.inspect: what it returns, and how that looks in a terminal and a notebook."""

from __future__ import annotations

import html.parser
import json
from pathlib import Path

import msgpack
import numpy as np
import pytest

import treering
from tests.cli.trees import in_every_form, saved, state
from tests.command import treering as command
from treering.errors import NotFoundError


def test_what_is_known_of_a_checkpoint(tmp_path: Path) -> None:
    path = saved(tmp_path / "ckpt", loss=0.5)
    found = treering.inspect(path)
    assert (found.path, found.form, found.verified) == (str(path), "checkpoint", True)
    assert found.metadata == {"loss": 0.5}
    assert found.written["by"] == f"treering {treering.__version__}"
    assert {file.name: file.nbytes for file in found.files} == {
        each.name: each.stat().st_size for each in path.iterdir()
    }
    assert found.nbytes == sum(file.nbytes for file in found.files)
    assert found.root["adam"].class_name == "tests.cli.trees.Adam"
    assert list(found.root) == list(state())
    leaves = found.leaves
    assert (leaves["params/w"].kind, leaves["params/w"].shape, leaves["params/w"].value) == ("jax", (4, 6), None)
    assert (leaves["adam/count"].kind, leaves["adam/count"].value) == ("int", 3)
    assert {type(leaf).__name__ for leaf in leaves.values()} == {"LeafRecord"}


def test_keys_are_those_of_open(tmp_path: Path) -> None:
    for path in in_every_form(tmp_path).values():
        with treering.open(path) as opened:
            assert list(treering.inspect(path).leaves) == list(opened)


def test_every_form_is_named(tmp_path: Path) -> None:
    forms = {name: treering.inspect(path) for name, path in in_every_form(tmp_path).items()}
    assert {name: (found.form, found.verified) for name, found in forms.items()} == {
        "checkpoint": ("checkpoint", True),
        "safetensors": ("safetensors", True),
        "foreign": ("safetensors", False),
        "msgpack": ("msgpack", False),
        "gzip": ("msgpack in gzip", False),
    }
    assert forms["foreign"].metadata == {"format": "np"}


def test_as_text(tmp_path: Path) -> None:
    path = saved(tmp_path / "ckpt", loss=0.5)
    found = treering.inspect(path)
    assert str(found) == command("inspect", str(path), code=0).stdout.rstrip("\n")
    for part in ("treering checkpoint, with checksums", 'metadata: {"loss": 0.5}', "Adam", "[3] numpy", "[2] key"):
        assert part in str(found)
    assert repr(found) == f"<Inspection of {str(path)!r}: treering checkpoint, with checksums; {totals(found)}>"


def totals(found: object) -> str:
    return str(found).splitlines()[-1].removeprefix("total: ")


class Parsed(html.parser.HTMLParser):
    """Counts tags, and finds out whether each is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_as_html_nothing_gets_through(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>"
    tree = {evil: np.zeros(3), "a": {"&amp;": evil}, '" onload="': 1}
    treering.save(tmp_path / evil.replace("/", "_"), tree, metadata={evil: evil})
    found = treering.inspect(tmp_path / evil.replace("/", "_"))
    parsed = Parsed(found._repr_html_())
    assert parsed.open == []
    assert set(parsed.seen) == {"div", "style", "details", "summary", "b", "i", "span"}
    assert parsed.text.count("<script>alert") == 5
    assert "&amp;" in parsed.text


def test_large_trees_are_folded(tmp_path: Path) -> None:
    tree = {f"layer{n}": {f"w{m}": 1 for m in range(50)} for n in range(50)}
    path = saved(tmp_path / "ckpt", tree)
    found = treering.inspect(path)
    assert len(str(found).splitlines()) < 70
    assert "50 leaves" in str(found)
    assert found._repr_html_().count('<div class="treering-row">') == 50
    wide = treering.inspect(saved(tmp_path / "wide", {f"w{n}": n for n in range(1000)}))
    assert len(str(wide).splitlines()) > 1000
    assert "and 900 more rows" in wide._repr_html_()
    everything = json.loads(command("inspect", str(path), "--json", code=0).stdout)
    assert len(everything["leaves"]) == 2500


def test_a_number_that_python_will_not_write(tmp_path: Path) -> None:
    path = saved(tmp_path / "ckpt", {"n": 7**20_000})
    assert "0x" in str(treering.inspect(path))
    found = json.loads(command("inspect", str(path), "--json", code=0).stdout)
    assert found["leaves"][0]["value"].startswith("0x")
    assert command("cat", str(path), "n", code=0).stdout.startswith("0x")
    assert not treering.diff(path, path)


def test_a_msgpack_file_says_nothing_about_itself(tmp_path: Path) -> None:
    path = tmp_path / "x.msgpack"
    path.write_bytes(msgpack.packb({"a": 1, 2: "b"}))
    found = treering.inspect(path)
    assert (found.written, found.metadata, found.files) == ({}, {}, ())
    assert found.root == {"a": 1, 2: "b"}
    assert list(found.leaves) == ["a", "2"]
    assert str(found).splitlines()[0] == f"{path} · {path.stat().st_size} B"


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no checkpoint"):
        treering.inspect(tmp_path)
