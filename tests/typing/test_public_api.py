"""treering's annotations arrive at its users: py.typed is there, and type checkers see the types that the docs name."""

import inspect
import json
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import treering
from treering import leaves, serialization

PROGRAM = Path(__file__).with_name("public_api.py")


@pytest.mark.slow
def test_a_users_program_type_checks(tmp_path: Path) -> None:
    # No settings but strict, and a cache of its own, away from the project's.
    check("mypy", "--strict", "--config-file=", f"--cache-dir={tmp_path}", str(PROGRAM), cwd=tmp_path)


@pytest.mark.slow
def test_a_users_program_type_checks_with_pyright(tmp_path: Path) -> None:
    # basedpyright is pyright with its own node: it fetches nothing. These are pyright's settings.
    settings = {
        "include": [str(PROGRAM)],
        "typeCheckingMode": "standard",
        "reportUnnecessaryTypeIgnoreComment": "error",
        "extraPaths": [str(Path(inspect.getfile(treering)).parents[1])],
    }
    config = tmp_path / "pyrightconfig.json"
    config.write_text(json.dumps(settings))
    check("basedpyright", "-p", str(config), "--pythonpath", sys.executable, cwd=tmp_path)


def check(checker: str, *arguments: str, cwd: Path) -> None:
    command = [sys.executable, "-m", checker, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "function",
    [
        leaves.tree_deserialize_leaves,
        serialization.from_bytes,
        serialization.from_compressed_bytes,
        serialization.load_from_file,
    ],
)
def test_overloads_take_what_the_function_takes(function: Callable[..., Any]) -> None:
    taken = {name: one.annotation for name, one in inspect.signature(function).parameters.items()}
    overloads = typing.get_overloads(function)
    assert overloads
    for overload in overloads:
        given = {name: one.annotation for name, one in inspect.signature(overload).parameters.items()}
        wanted = {name for name in taken if taken[name] != given.get(name)}
        assert set(given) == set(taken)
        assert wanted <= {"like", "target"}
