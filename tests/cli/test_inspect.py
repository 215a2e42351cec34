"""treering inspect: the tree, JSON, hostile files, other forms, exit codes."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import msgpack
import numpy as np
import pytest

from tests.command import here, treering
from treering import serialization


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tree = {"params": {"dense": {"kernel": np.zeros((2, 3), np.float32), "bias": np.zeros(3, np.float32)}}, "step": 7}
    path = tmp_path / "state.msgpack"
    serialization.save_to_file(tree, path)
    return path


def test_the_tree(file: Path) -> None:
    lines = treering("inspect", str(file), code=0).stdout.splitlines()
    assert lines[0] == f"{file} · {file.stat().st_size} B"
    assert lines[2].startswith("├─ params")
    assert lines[4].split() == ["│", "├─", "kernel", "float32", "[2,", "3]", "6", "24", "B"]
    assert lines[-1] == "total: 3 leaves, 9 parameters in 2 arrays, 44 B"


def test_json_is_one_object(file: Path) -> None:
    found = json.loads(here("inspect", str(file), "--json", code=0).stdout)
    assert found["schema"] == "treering.inspect/1"
    assert found["file_bytes"] == file.stat().st_size
    kernel = next(leaf for leaf in found["leaves"] if leaf["key"] == "params/dense/kernel")
    assert (kernel["dtype"], kernel["shape"], kernel["nbytes"]) == ("float32", [2, 3], 24)
    assert file.read_bytes()[kernel["offset"] :][:24] == bytes(24)


def test_globs_and_depth(file: Path) -> None:
    out = here("inspect", str(file), "**/kernel", code=0).stdout
    assert "kernel" in out
    assert "bias" not in out
    assert "kernel" not in here("inspect", str(file), "--depth", "1", code=0).stdout


def test_nothing_matches(file: Path) -> None:
    done = here("inspect", str(file), "nope", code=1)
    assert done.stderr.splitlines()[0] == f"error: nothing in '{file}' matches 'nope'"
    assert json.loads(here("inspect", str(file), "nope", "--json", code=1).stdout)["leaves"] == []


def test_a_glob_that_is_none(file: Path) -> None:
    assert "stands alone" in here("inspect", str(file), "a~b", code=2).stderr


def test_the_gzip_form(file: Path) -> None:
    squeezed = file.with_suffix(".gz")
    squeezed.write_bytes(gzip.compress(file.read_bytes()))
    assert "kernel" in here("inspect", str(squeezed), code=0).stdout
    squeezed.write_bytes(gzip.compress(b"\x80" + bytes(10**8)))
    assert here("inspect", str(squeezed), code=1).stderr.startswith("error: ")


@pytest.mark.parametrize("keep", [10, 60, -1])
def test_damage_is_exit_code_one(file: Path, keep: int) -> None:
    file.write_bytes(file.read_bytes()[:keep])
    done = here("inspect", str(file), code=1)
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")


def test_no_such_file_and_a_folder(tmp_path: Path) -> None:
    assert "No such file" in here("inspect", str(tmp_path / "nope"), code=2).stderr
    assert here("inspect", str(tmp_path), code=2).stderr.startswith("error: ")


def zipped(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, b"x" * 300)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "wanted"),
    [(zipped("a.txt"), "a zip archive"), (pickle.dumps({"a": 1}), "a pickle"), (b'{"a": 1}', "a JSON text")],
)
def test_other_forms_are_called_by_their_names(tmp_path: Path, content: bytes, wanted: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert wanted in here("inspect", str(path), code=2).stderr


def test_hostile_keys_reach_no_terminal(tmp_path: Path) -> None:
    path = tmp_path / "hostile.msgpack"
    path.write_bytes(msgpack.packb({"\x1b[2J": {"\u202eevil": "\x07"}, "a\nb": 1}))
    for arguments in ([], ["--json"]):
        text = here("inspect", str(path), *arguments, code=0).stdout
        assert all(line.isprintable() for line in text.splitlines())
    path.write_bytes(b"\x81\xa1\x1b\xc1")
    assert here("inspect", str(path), code=1).stderr.strip().isprintable()


@pytest.mark.slow
def test_a_hundred_thousand_levels(tmp_path: Path) -> None:
    path = tmp_path / "deep.msgpack"
    path.write_bytes(b"\x82\xa1b\x01\xa1a" * 100_000 + b"\x01")
    text = treering("inspect", str(path), code=0).stdout
    assert len(text) < 20_000
    assert "total: 100,001 leaves" in text
    assert json.loads(treering("inspect", str(path), "--json", code=0).stdout)["total"]["leaves"] == 100_001


def test_ascii_output(file: Path) -> None:
    text = treering("inspect", str(file), code=0, PYTHONIOENCODING="ascii").stdout
    assert "|- params" in text
    file.write_bytes(msgpack.packb({"é": 1}))
    assert "\\xe9" in treering("inspect", str(file), code=0, PYTHONIOENCODING="ascii").stdout


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "wide.msgpack"
    path.write_bytes(msgpack.packb({f"key_{number}": number for number in range(20_000)}))
    with subprocess.Popen(
        [sys.executable, "-m", "treering", "inspect", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_named(file: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "treering", "inspect", str(file)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "error: could not write the output: No space left on device\n"


def test_it_starts_quickly(file: Path) -> None:
    # Processor time, the best of five at most: on a busy machine the clock on the wall says little. 0.2 on a quiet one.
    seconds = []
    for _ in range(5):
        before = os.times()
        treering("inspect", str(file), code=0)
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
        if seconds[-1] < 0.6:
            break
    assert min(seconds) < 0.6
