"""treering verify: every finding a line, and what cannot be checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import treering as package
from tests.cli.trees import in_every_form, saved
from tests.command import here


def flipped(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_every_form_is_whole(tmp_path: Path) -> None:
    for name, path in in_every_form(tmp_path).items():
        said = here("verify", str(path), code=0).stdout
        assert ("is whole" in said) == (name in {"checkpoint", "safetensors", "gzip"}), name
        assert said.count("\n") == 1
        found = json.loads(here("verify", str(path), "--json", code=0).stdout)
        assert (found["schema"], found["ok"], found["findings"]) == ("treering.verify/1", True, [])
        assert found["checked"] is (found["note"] is None)


def test_every_finding_is_a_line(tmp_path: Path) -> None:
    tree = {f"layer_{number:03}": np.arange(64.0) for number in range(120)}
    path = saved(tmp_path / "ckpt", tree)
    data = next(path.glob("data-*"))
    first = package.inspect(path).leaves["layer_000"].offset or 0
    for number in range(0, 120, 2):
        flipped(data, first + 512 * number + 9)
    lines = here("verify", str(path), code=1).stdout.splitlines()
    assert lines[0].endswith("60 findings")
    assert [line.split("'")[1] for line in lines[1:]] == [f"layer_{number:03}" for number in range(0, 120, 2)]
    found = json.loads(here("verify", str(path), "--json", code=1).stdout)
    assert not found["ok"]
    assert found["findings"][3] == {
        "key": "layer_006",
        "file": data.name,
        "start": first + 512 * 6,
        "stop": first + 512 * 7,
        "problem": "is damaged",
    }


def test_a_lost_file_and_a_damaged_index(tmp_path: Path) -> None:
    path = saved(tmp_path / "ckpt")
    next(path.glob("data-*")).unlink()
    assert "is missing" in here("verify", str(path), code=1).stdout
    flipped(path / "treering.json", 200)
    assert "treering.json" in here("verify", str(path), code=1).stdout


def test_what_cannot_be_read_is_two(tmp_path: Path) -> None:
    assert here("verify", str(tmp_path / "nope"), code=2).stderr.startswith("error: ")
    (tmp_path / "x.gguf").write_bytes(b"GGUF\x03")
    assert "a GGUF file" in here("verify", str(tmp_path / "x.gguf"), code=2).stderr
    assert here("verify", str(tmp_path), code=2).stderr.startswith("error: there is no checkpoint")


def test_hostile_names_reach_no_terminal(tmp_path: Path) -> None:
    path = saved(tmp_path / "ckpt", {"\x1b[2J\u202e": np.arange(64.0)})
    flipped(next(path.glob("data-*")), 4099)
    said = here("verify", str(path), code=1).stdout
    assert all(line.isprintable() for line in said.splitlines())
    assert "damaged" in said


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="Windows has no pseudo terminals")
def test_short_work_shows_no_progress(tmp_path: Path) -> None:
    path = saved(tmp_path / "ckpt")
    parent, child = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "treering", "verify", str(path)], stdout=subprocess.PIPE, stderr=child
    ) as process:
        os.close(child)
        assert process.stdout
        assert b"is whole" in process.stdout.read()
    assert process.returncode == 0
    os.set_blocking(parent, False)
    with pytest.raises(OSError, match=r".*"):
        # Nothing was written, and nobody can write any more.
        os.read(parent, 1)
    os.close(parent)
