"""treering ls and treering du over every form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import treering as package
from tests.cli.runs import a_run
from tests.cli.trees import in_every_form, saved
from tests.command import here, inside, treering


def listed(path: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(here("ls", str(path), *arguments, "--json", code=code).stdout)
    return found


def test_one_leaf_a_line(tmp_path: Path) -> None:
    lines = treering("ls", str(saved(tmp_path / "ckpt")), code=0).stdout.splitlines()
    cells = {line.split()[0]: line.split()[1:] for line in lines}
    assert cells["params/w"] == ["float32", "[4,", "6]", "96", "B"]
    assert cells["params/b"] == ["bfloat16", "[3]", "numpy", "6", "B"]
    assert cells["key"] == ["uint32", "[2]", "key", "8", "B"]
    assert cells["names/1"] == ["None", "0", "B"]
    assert cells["5/a~1b"][:1] == ["int8"]
    assert cells["note"] == ["str", "long", "9.77", "KiB"]
    assert "empty" not in cells
    assert len(lines) == 16


def test_json_names_kinds_and_files(tmp_path: Path) -> None:
    path = saved(tmp_path / "ckpt", run="a")
    found = listed(path)
    assert (found["schema"], found["form"], found["verified"]) == ("treering.ls/1", "checkpoint", True)
    assert found["metadata"] == {"run": "a"}
    assert {file["name"] for file in found["files"]} == {each.name for each in path.iterdir()}
    leaves = {leaf["key"]: leaf for leaf in found["leaves"]}
    assert (leaves["params/w"]["kind"], leaves["params/b"]["kind"]) == ("jax", "numpy")
    assert leaves["key"]["impl"] == "fry" or leaves["key"]["impl"].startswith("threefry")
    assert leaves["act"]["kind"] == "opaque"
    assert leaves["wide"]["value"] == 2**70
    assert leaves["nan"]["value"] == "nan"
    where = leaves["params/w"]
    data = (path / where["file"]).read_bytes()[where["offset"] :][:8]
    assert data == b"\0\0\0\0\0\0\x80?"


def test_every_form(tmp_path: Path) -> None:
    for name, path in in_every_form(tmp_path).items():
        keys = {leaf["key"]: leaf["shape"] for leaf in listed(path)["leaves"]}
        wanted = {"w": [4, 6], "n": [5], "a.b": []} if name == "foreign" else None
        assert keys == (wanted or {"w": [4, 6], "b": [3], "deep/n": [5], "deep/none": [0, 3]}), name


def test_globs(tmp_path: Path) -> None:
    path = saved(tmp_path / "ckpt")
    assert [leaf["key"] for leaf in listed(path, "params", "**/mu/*")["leaves"]] == [
        "params/w",
        "params/b",
        "adam/mu/w",
    ]
    assert listed(path, "nope", code=1)["leaves"] == []
    assert "matches 'nope'" in here("ls", str(path), "nope", code=1).stderr


def test_a_bare_array_and_an_empty_tree(tmp_path: Path) -> None:
    assert here("ls", str(saved(tmp_path / "one", 7)), code=0).stdout.startswith("(the root)  int")
    assert here("ls", str(saved(tmp_path / "none", {})), code=0).stdout == ""


def test_damage_is_one(tmp_path: Path) -> None:
    path = saved(tmp_path / "ckpt")
    index = path / "treering.json"
    index.write_bytes(index.read_bytes().replace(b"float32", b"float64"))
    done = here("ls", str(path), code=1)
    assert done.stdout == ""
    assert "treering.json is damaged" in done.stderr
    assert here("ls", str(tmp_path / "nope"), code=2).stderr.startswith("error: ")


@pytest.mark.parametrize(("depth", "wanted"), [("0", ["(the root)"]), ("1", ["note", "params/"])])
def test_du_divides_the_whole(tmp_path: Path, depth: str, wanted: list[str]) -> None:
    path = saved(tmp_path / "ckpt")
    lines = here("du", str(path), "--depth", depth, code=0).stdout.splitlines()
    assert lines[0].split() == ["bytes", "part", "leaves", "key"]
    assert [line.split("  ")[-1] for line in lines[1 : 1 + len(wanted)]] == wanted
    assert lines[-1].endswith("total")
    found = json.loads(here("du", str(path), "--depth", depth, "--json", code=0).stdout)
    assert found["schema"] == "treering.du/1"
    assert sum(share["nbytes"] for share in found["shares"]) == found["total"]["nbytes"]
    sizes = [share["nbytes"] for share in found["shares"]]
    assert sizes == sorted(sizes, reverse=True)


def test_du_of_a_part(tmp_path: Path) -> None:
    path = in_every_form(tmp_path)["msgpack"]
    found = json.loads(here("du", str(path), "deep/**", "--json", code=0).stdout)
    assert [share["key"] for share in found["shares"]] == ["deep/n", "deep/none"]
    assert found["selected"]["nbytes"] == 40
    assert here("du", str(path), "nope", code=1).stderr.startswith("error: nothing")


@pytest.mark.parametrize("verb", ["ls", "inspect", "du"])
def test_where_nothing_matches_the_nearest_key_is_named(tmp_path: Path, verb: str) -> None:
    path = str(saved(tmp_path / "ckpt"))
    for globs, hint in (
        (["parms"], "did you mean 'params'?"),
        (["Adam/MU"], "did you mean 'adam/mu'?"),
        (["parms", "namess"], "did you mean 'params' or 'names'?"),
        (["zzz"], f"treering ls {path!r} lists all keys"),
        (["zzz*"], "'*' stays inside one part of a key; '**/NAME' looks at every depth"),
    ):
        done = here(verb, path, *globs, code=1)
        # No table of nothing.
        assert done.stdout == ""
        assert done.stderr.splitlines()[1] == f"hint: {hint}"


def test_what_ls_does_not_list_is_noted(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt")
    package.save(path, {"params": {"w": 1}, "step": 7})
    out, err = inside("ls", path, "params", "zzz", code=0)
    assert out.split() == ["params/w", "int", "1", "8", "B"]
    assert err == f"note: nothing in {path!r} matches 'zzz'\n"
    package.save(path, {}, overwrite=True)
    assert inside("ls", path, code=0) == ("", f"note: the tree in {path!r} has no leaf\n")
    run = a_run(tmp_path / "run", 1)
    inside("rm", str(run), "1", code=0)
    assert inside("ls", str(run), code=0) == ("", "note: the run has no step yet\n")
    assert inside("cp", path, "memory://noted/ckpt", code=0)[1].startswith(
        "note: memory:// is the memory of this process"
    )
