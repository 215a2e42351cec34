"""dev.py: it makes what is missing, repairs what is broken, touches nothing else, and says what it cannot do."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dev
from tests import faults


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for venv and pip; return what was done."""
    done: list[str] = []

    def create(home: Path) -> None:
        done.append("create")
        dev.python_of(home).parent.mkdir(parents=True)
        dev.python_of(home).touch()

    monkeypatch.setattr(dev, "create", create)
    monkeypatch.setattr(dev, "install", lambda home, extras: done.append(f"install {','.join(extras)}"))
    return done


def test_the_second_time_nothing_is_done(tmp_path: Path, installs: list[str]) -> None:
    dev.ready(tmp_path / "v", ("test",))
    dev.ready(tmp_path / "v", ("test",))
    dev.ready(tmp_path / "v", ())
    assert installs == ["create", "install test"]


def test_another_verb_adds_to_what_is_there(tmp_path: Path, installs: list[str]) -> None:
    dev.ready(tmp_path / "v", ())
    dev.ready(tmp_path / "v", ("test",))
    dev.ready(tmp_path / "v", ("docs",))
    assert installs == ["create", "install ", "install test", "install docs,test"]


def test_new_pins_are_installed_into_the_same_folder(
    tmp_path: Path, installs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dev.ready(tmp_path / "v", ("test",))
    pins = tmp_path / "constraints.txt"
    pins.write_text("jax==99\n")
    monkeypatch.setattr(dev, "CONSTRAINTS", pins)
    dev.ready(tmp_path / "v", ())
    assert installs == ["create", "install test", "install test"]


def test_an_interrupted_install_is_made_again(
    tmp_path: Path, installs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        faults.fail(patch, dev, "install", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            dev.ready(tmp_path / "v", ())
    dev.python_of(tmp_path / "v").unlink()
    dev.python_of(tmp_path / "v").parent.rmdir()
    dev.ready(tmp_path / "v", ())
    assert installs == ["create", "create", "install "]


@pytest.mark.parametrize("stamp", ["", "{", "[]", '{"python": 1}'])
def test_a_damaged_stamp_is_as_good_as_none(tmp_path: Path, installs: list[str], stamp: str) -> None:
    (tmp_path / dev.STAMP).write_text(stamp)
    dev.ready(tmp_path, ())
    assert installs == ["create", "install "]


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "thesis.tex"
    mine.write_text("ten years")
    with pytest.raises(dev.Stop, match="was not made by dev"):
        dev.create(tmp_path)
    assert mine.read_text() == "ten years"
    assert list(tmp_path.iterdir()) == [mine]


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "v").write_text("")
    with pytest.raises(dev.Stop, match="could not make"):
        dev.create(tmp_path / "v")


def test_an_old_python_is_told_which_one_would_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dev, "OLDEST", (3, 999))
    assert dev.main(["demo"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("dev.py: treering needs Python 3.999 or newer, and this is 3.")
    assert line.count("\n") == 1


def test_a_missing_ensurepip_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ensurepip" else found(name))
    assert dev.main(["demo", "--venv", str(tmp_path / "v")]) == 2
    assert "comes without its module ensurepip; on Debian and Ubuntu: apt install python3." in capsys.readouterr().err
    assert not (tmp_path / "v").exists()


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["-k", "gzip", "tests/cli"], ["-k", "gzip", "tests/cli"]),
        (["--", "-k", "gzip", "--"], ["-k", "gzip", "--"]),
        (["-q", "--", "--venv", "x"], ["-q", "--venv", "x"]),
    ],
)
def test_what_dev_does_not_know_goes_to_the_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], passed: list[str]
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(dev, "ready", lambda home, extras: seen.append((home, extras)))
    monkeypatch.setattr(dev, "run", lambda steps, home: seen.append(steps[0][-3:]))
    dev.main(["test", "--venv", str(tmp_path / "v"), *given])
    assert seen == [(tmp_path / "v", ("test",)), passed]


def test_tools_see_this_checkout_and_keep_what_they_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")
    for name in names:
        monkeypatch.setenv(name, str(tmp_path))
    step = [sys.executable, "-c", f"import os, sys; sys.exit(any(name in os.environ for name in {names}))"]
    assert dev.run([step, step], tmp_path) == 0
    assert Path.cwd() == dev.ROOT


def test_the_tests_of_buckets_are_those_of_checkpoints_runs_and_leaves_too() -> None:
    plain, again = dev.commands("test", Path("v"), ["-m", "bucket"])
    assert plain[-2:] == ["-m", "bucket"]
    assert again[-5:] == ["tests/checkpoint", "tests/run", "tests/leaves", "--store", "seaweed"]
    assert len(dev.commands("test", Path("v"), ["tests/bucket", "-m", "bucket"])) == 1


def test_pins_are_told_apart_by_python() -> None:
    frozen = {
        "3.13": {"jax": "12", "numpy": "2", "uvloop": "1"},
        "3.9": {"jax": "10", "numpy": "2"},
        "3.12": {"jax": "12", "numpy": "2", "uvloop": "1"},
    }
    assert dev.merged(frozen) == [
        'jax==10; python_version < "3.12"',
        'jax==12; python_version >= "3.12"',
        "numpy==2",
        'uvloop==1; python_version >= "3.12"',
    ]


def test_help_needs_nothing() -> None:
    done = subprocess.run([sys.executable, dev.__file__, "--help"], capture_output=True, text=True, check=True)
    assert all(verb in done.stdout for verb in dev.EXTRAS)


def test_every_referee_is_asked_or_those_that_are_named() -> None:
    (command,) = dev.commands("referee", Path("v"), [])
    there = {conftest.parent.name for conftest in (Path(__file__).parent / "compat").glob("*/conftest.py")}
    assert there <= {Path(each).name for each in command}
    assert dev.commands("referee", Path("v"), ["tests/compat/orbax", "-x"])[0][-3:] == [
        "not benchmark", "tests/compat/orbax", "-x",
    ]  # fmt: skip


def test_heavy_packages_get_an_environment_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, tuple[str, ...]]] = []
    monkeypatch.setattr(dev, "ready", lambda home, extras: seen.append((home.name, extras)))
    monkeypatch.setattr(dev, "run", lambda steps, home: 0)
    for line in ("test", "recipes", "referee", "bench", "bench leaves"):
        assert dev.main(line.split()) == 0
    assert seen == [
        (".venv", ("test",)), (".venv-recipes", ("recipes", "test")), (".venv-referee", ("referee", "test")),
        (".venv", ("test",)), (".venv-referee", ("referee", "test")),
    ]  # fmt: skip


def test_the_recipes_are_chosen_by_their_mark() -> None:
    (command,) = dev.commands("recipes", Path("v"), ["-x"])
    assert command[-4:] == ["-m", "recipes", "tests/docs/test_recipes.py", "-x"]
