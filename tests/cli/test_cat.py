"""treering cat: values, slices, .npy, and what it refuses."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import limits
from tests.cli.trees import arrays, in_every_form, saved
from tests.command import ended, here
from tests.drawn import drawn
from treering import serialization


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("cat") / "ckpt")


def printed(path: Path, key: str, *arguments: str) -> str:
    return here("cat", str(path), key, *arguments, code=0).stdout


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("params/w[:2,3]", "[3. 9.]"),
        ("params/w[1, -1]", "11.0"),
        ("params/w[::-3, :2]", "[[18. 19.]\n [ 0.  1.]]"),
        ("params/w[..., 5]", "[ 5. 11. 17. 23.]"),
        ("params/w[3:1]", "[]  (shape [0, 6])"),
        ("params/b", "[0 1 2]"),
        ("key", "[0 0]"),
        ("5/a~1b", "7"),
        ("names/0", "'a'"),
        ("names/1", "None"),
        ("names/2/1", "2.5"),
        ("adam/count", "3"),
        ("raw", r"b'\x00\xff'"),
        ("nan", "nan"),
        ("wide", "1180591620717411303424"),
        ("c", "(1-2j)"),
        ("note", repr("long " * 2000)),
    ],
)
def test_what_is_printed(checkpoint: Path, key: str, wanted: str) -> None:
    assert printed(checkpoint, key) == wanted + "\n"


def hostile() -> None:
    """Bear a name that would clear the screen."""


hostile.__qualname__ = "\x1b[2J evil"


def test_values_are_whole_and_safe(tmp_path: Path) -> None:
    tree = {"n": 7**3000, "b": bytes(300), "text": "\x1b[2J" * 100, "act": hostile}
    path = saved(tmp_path / "ckpt", tree)
    for key in ("n", "b", "text"):
        assert printed(path, key) == f"{tree[key]!r}\n"
    assert json.loads(printed(path, "n", "--json"))["value"] == tree["n"]
    assert json.loads(printed(path, "b", "--json"))["value"] == repr(tree["b"])
    assert json.loads(printed(path, "text", "--json"))["value"] == tree["text"]
    assert printed(path, "act").strip().isprintable()


def test_floats_have_as_many_digits_as_they_need(tmp_path: Path) -> None:
    values = np.array([0.1, 1 / 3, 1e-300, np.nan, -0.0])
    path = saved(tmp_path / "ckpt", {"x": values})
    shown = np.array([float(text) for text in printed(path, "x").strip("[]\n").split()])
    assert shown.tobytes() == values.tobytes()


@pytest.mark.parametrize("dtype", ["M8", "M8[10ns]", "M8[999999999W]"])
def test_dates_that_numpy_has_no_text_for_are_shown_as_numbers(tmp_path: Path, dtype: str) -> None:
    dates = np.array([7, 2**62]).view(dtype)
    less = (dates.view("i8") - 1).view(dtype)
    path = saved(tmp_path / "ckpt", {"x": dates, "y": dates[1]})
    assert printed(path, "x") == f"{with_text(dates)}\n"
    assert printed(path, "y") == f"{with_text(dates)[1]}\n"
    assert json.loads(printed(path, "x", "--json"))["value"] == [str(with_text(dates)[at]) for at in (0, 1)]
    other = saved(tmp_path / "other", {"x": dates, "y": less[1]})
    differs = f"{with_text(dates)[1]} in A, {with_text(less)[1]} in B"
    assert differs in here("diff", str(path), str(other), "--values", code=1).stdout


def with_text(dates: Any) -> Any:
    """Return dates; where this numpy has no text for them, which no version has for dates of no unit, their numbers."""
    with contextlib.suppress(ValueError, OverflowError):
        if dates.dtype != "M8" and len(np.datetime_as_string(dates)):
            return dates
    return dates.view("i8")


def test_a_large_array_is_shown_by_its_edges(tmp_path: Path) -> None:
    array = np.arange(90_000.0).reshape(300, 300)
    path = saved(tmp_path / "ckpt", {"x": array})
    done = here("cat", str(path), "x", code=0)
    with np.printoptions(threshold=10, edgeitems=3, floatmode="unique", linewidth=100):
        assert done.stdout == f"{array}\n"
    assert "90,000 items, shown by their edges" in done.stderr
    everything = here("cat", str(path), "x[:, ::2]", "--all", code=0)
    assert everything.stderr == ""
    assert "..." not in everything.stdout
    assert len(everything.stdout.split()) >= 45_000


def test_json_has_every_value(checkpoint: Path, tmp_path: Path) -> None:
    found = json.loads(printed(checkpoint, "params/w[1:3, 0]", "--json"))
    assert found["schema"] == "treering.cat/1"
    assert (found["key"], found["slices"], found["dtype"]) == ("params/w", "1:3, 0", "float32")
    assert (found["shape"], found["value"]) == ([2], [6.0, 12.0])
    tree = {"c": np.array([1 + 2j, np.nan]), "t": np.array(["2026-01-01"], "datetime64[D]"), "big": 3**40, "x": np.inf}
    path = saved(tmp_path / "ckpt", tree)
    values = {key: json.loads(printed(path, key, "--json"))["value"] for key in tree}
    assert values == {"c": [[1.0, 2.0], ["nan", 0.0]], "t": ["2026-01-01"], "big": 3**40, "x": "inf"}


def npy_of(path: Path, key: str) -> tuple[np.ndarray, str]:
    done = subprocess.run(
        [sys.executable, "-m", "treering", "cat", str(path), key, "--npy"], capture_output=True, check=True
    )
    return np.load(io.BytesIO(done.stdout)), done.stderr.decode()


def test_npy(checkpoint: Path) -> None:
    array, said = npy_of(checkpoint, "params/w[1:, ::2]")
    assert said == ""
    assert np.array_equal(array, np.arange(24, dtype=np.float32).reshape(4, 6)[1:, ::2])
    scalar, _ = npy_of(checkpoint, "params/w[1, 1]")
    assert scalar.shape == ()
    assert scalar == 7
    array, said = npy_of(checkpoint, "params/b")
    assert np.array_equal(array.view(ml_dtypes.bfloat16), arrays()["b"])
    assert ".npy has no bfloat16" in said


def test_every_form_gives_the_same(tmp_path: Path) -> None:
    shown = [
        [printed(path, key) for key in ("w[1:3, ::2]", "w")]
        for name, path in in_every_form(tmp_path).items()
        if name != "foreign"
    ]
    assert all(each == shown[0] for each in shown)
    foreign = in_every_form(tmp_path / "again")["foreign"]
    assert printed(foreign, "a.b") == "2.5\n"
    assert printed(foreign, "w[1:3, ::2]") == shown[0][0]


def test_a_chunked_msgpack_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits.lower(monkeypatch, chunk_of_state_dicts=1000)
    array = np.arange(3000, dtype=np.int16).reshape(100, 30)
    path = tmp_path / "x.msgpack"
    serialization.save_to_file({"x": array}, path)
    assert b"chunks" in path.read_bytes()
    back, _ = npy_of(path, "x")
    assert np.array_equal(back, array)
    back, _ = npy_of(path, "x[17:90:7, 3]")
    assert np.array_equal(back, array[17:90:7, 3])


def test_text_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "x.msgpack"
    path.write_bytes(b"\x81\xa1a\xda\x10\x00" + b"\xff" * 4096)
    assert "is not UTF-8" in here("cat", str(path), "a", code=1).stderr
    path.write_bytes(b"\x81\xa1a\xda\x10\x00" + b"y" * 4096)
    assert printed(path, "a") == f"{'y' * 4096!r}\n"


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("key", "arguments", "wanted", "hint"),
    [
        ("paramz/w", [], "has no leaf 'paramz/w'", "did you mean 'params/w'"),
        ("params", [], "is not a leaf of", "'params/w' is its first leaf"),
        ("", [], "but a branch of 16", "params/w"),
        ("zzz", [], "has no leaf 'zzz'", "treering ls"),
        ("params/w[4]", [], "index 4 is out of range: axis 0 has 4 items", "-4 to 3"),
        ("params/w[1,2,3]", [], "has 3 indices", "KEY["),
        ("params/w[x]", [], "'x' cannot be read", "KEY["),
        ("params/w[]", [], "cannot be read", "KEY["),
        ("params/w[::0]", [], "a step cannot be 0", "KEY["),
        ("params/w[..., ...]", [], "'...' twice", "KEY["),
        ("note[1]", [], "has no slices, because it is not an array but a Python str", None),
        ("nan", ["--npy"], "cannot be written as .npy", None),
    ],
)
def test_what_is_refused(checkpoint: Path, key: str, arguments: list[str], wanted: str, hint: str | None) -> None:
    done = here("cat", str(checkpoint), key, *arguments, code=2)
    lines = done.stderr.splitlines()
    assert wanted in lines[0]
    assert len(lines) == (2 if hint else 1)
    assert hint is None or hint in lines[1]
    assert done.stdout == ""


def test_an_empty_branch_is_no_leaf(tmp_path: Path) -> None:
    path = str(saved(tmp_path / "ckpt", {"e": {}, "emb": 1}))
    said = here("cat", path, "e", code=2).stderr.splitlines()
    assert said == [f"error: 'e' is not a leaf of {path!r} but a branch of 0", "hint: it is empty"]
    empty = str(saved(tmp_path / "empty", {}))
    assert "(the root) is not a leaf of" in here("cat", empty, "", code=2).stderr


def test_damage_is_named_only_where_it_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "ckpt", {"a": np.arange(64.0), "b": np.arange(32.0)})
    data = next(path.glob("data-*"))
    content = bytearray(data.read_bytes())
    content[4096 + 8] ^= 1
    data.write_bytes(content)
    done = here("cat", str(path), "a", code=1)
    assert "leaf 'a'" in done.stderr
    assert data.name in done.stderr
    assert printed(path, "b[3]") == "3.0\n"


def test_a_terminal_gets_no_npy(checkpoint: Path) -> None:
    pty = pytest.importorskip("pty", reason="Windows has no pseudo terminals")
    parent, child = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "treering", "cat", str(checkpoint), "params/w", "--npy"],
        stdout=child,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(child)
        assert process.stderr
        assert "cannot be shown on a terminal" in process.stderr.read()
    os.close(parent)
    assert process.returncode == 2


def test_a_key_with_brackets_wins(tmp_path: Path) -> None:
    path = saved(tmp_path / "ckpt", {"a[0]": 1, "a": np.arange(3.0)})
    assert printed(path, "a[0]") == "1\n"
    assert printed(path, "a[-1]") == "2.0\n"
    assert printed(path, "a") == "[0. 1. 2.]\n"


bounds = st.none() | st.integers(-9, 9)
parts = st.integers(-2, 1) | st.builds(slice, bounds, bounds, bounds.filter(lambda step: step != 0))


def written(part: int | slice) -> str:
    if isinstance(part, int):
        return str(part)
    sides = ["" if side is None else str(side) for side in (part.start, part.stop, part.step)]
    return ":".join(sides if part.step is not None else sides[:2])


@pytest.fixture(scope="module")
def cubes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = {"cube": np.arange(2 * 5 * 4).reshape(2, 5, 4), "flat": np.arange(12).reshape(3, 4)}
    return saved(tmp_path_factory.mktemp("cubes") / "ckpt", tree)


def shown(path: Path, key: str) -> tuple[int, Any]:
    """The exit code of cat, and the array that it writes."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = ended("cat", path, key, "--npy")
    out.flush()
    return int(code or 0), None if code else np.load(io.BytesIO(out.detach().getvalue()))


@settings(max_examples=drawn(50))
@given(st.lists(parts, max_size=3), st.integers(0, 3), st.booleans())
def test_slices_mean_what_numpy_means(cubes: Path, chosen: list[int | slice], at: int, dots: bool) -> None:
    array = np.arange(2 * 5 * 4).reshape(2, 5, 4)
    at = min(at, len(chosen))
    wanted = (*chosen[:at], ..., *chosen[at:]) if dots else tuple(chosen)
    text = ", ".join("..." if part is Ellipsis else written(part) for part in wanted) or "..."
    code, found = shown(cubes, f"cube[{text}]")
    assert code == 0
    assert np.array_equal(found, array[wanted])


@settings(max_examples=drawn(50))
@given(st.text(alphabet="0123456789-+:., xe_", max_size=8))
def test_any_text_is_slices_or_refused(cubes: Path, text: str) -> None:
    code, found = shown(cubes, f"flat[{text}]")
    assert code in (0, 2)
    if code == 0:
        assert np.array_equal(found, eval(f"np.arange(12).reshape(3, 4)[{text}]"))


@pytest.mark.parametrize(
    ("key", "wanted", "hint"),
    [
        ("params/*", "cat takes one key, not a glob: 'params/*'", "treering ls lists what a glob matches"),
        ("params/*[0]", "cat takes one key, not a glob: 'params/*'", "treering ls lists what a glob matches"),
        ("params/w[0", "the bracket of 'params/w[0' is not closed", "'params/w[0]' closes it"),
    ],
)
def test_what_is_no_key_is_told(checkpoint: Path, key: str, wanted: str, hint: str) -> None:
    done = here("cat", str(checkpoint), key, code=2)
    assert done.stderr.splitlines() == [f"error: {wanted}", f"hint: {hint}"]


def test_stars_and_brackets_in_a_key_are_the_key(tmp_path: Path) -> None:
    path = saved(tmp_path / "ckpt", {"a*": 1, "b[": 2})
    assert printed(path, "a*") == "1\n"
    assert printed(path, "b[") == "2\n"
