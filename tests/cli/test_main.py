"""The command itself: help, version, unknown verbs, one-line errors, exit codes."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

import treering as package
from tests import faults
from tests.cli.trees import saved
from tests.command import HEAVY, ended, here, imported_by, treering
from treering.errors import CorruptError, NotFoundError, StoreError, TreeringError, UnsupportedError

VERBS = ("cat", "diff", "du", "inspect", "ls", "verify")


def test_help_has_every_verb_and_an_example() -> None:
    text = here("--help", code=0).stdout
    for verb in VERBS:
        assert re.search(rf"^  {verb} +[A-Z]", text, re.MULTILINE)
    assert "treering inspect" in text


def test_help_is_a_verb_too() -> None:
    assert here("help", code=0).stdout == here("--help", code=0).stdout
    assert here("help", "ls", code=0).stdout == here("ls", "--help", code=0).stdout


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_shows_examples(verb: str) -> None:
    text = here(verb, "--help", code=0).stdout
    assert "Examples:" in text
    assert f"treering {verb}" in text
    assert all(len(line) <= 100 for line in text.splitlines())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("main") / "ckpt")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("verb", ["ls", "du", "inspect"])
def test_what_shows_headers_starts_without_numpy(verb: str, checkpoint: Path) -> None:
    assert not imported_by(verb, str(checkpoint)) & HEAVY


def test_what_shows_headers_needs_no_hashes_of_the_system(checkpoint: Path) -> None:
    assert not imported_by("ls", str(checkpoint)) & {"hashlib", "random", "secrets", "shutil", "difflib", "html"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("arguments", [["verify"], ["cat", "params/w"], ["diff", "--values"]])
def test_what_reads_arrays_starts_without_jax(arguments: list[str], checkpoint: Path) -> None:
    verb, *more = arguments
    paths = [str(checkpoint)] * (2 if verb == "diff" else 1)
    assert not imported_by(verb, *paths, *more) & {"jax", "jaxlib", "rich"}


def test_the_version() -> None:
    assert treering("--version", code=0).stdout == f"treering {package.__version__}\n"


def test_the_version_is_told_by_the_package_alone() -> None:
    assert not imported_by("--version") & {*HEAVY, "click", "treering._cli"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_version_that_cannot_be_written() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "treering", "--version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "error: could not write the output: No space left on device\n")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["inspct", "x"], "there is no verb 'inspct'; did you mean 'inspect'?"),
        (["zzz"], "there is no verb 'zzz'"),
        (["inspect"], "Missing argument"),
        (["inspect", "x", "--depth", "201"], "'201' is not a whole number from 0 to 200"),
        (["du", "x", "--depth", "x"], "'x' is not a whole number from 0 to 200"),
        (["gc", "x", "--keep-last", "x"], "'x' is not a whole number from 1 on"),
        (["gc", "x", "--keep-step", "-1"], "'-1' is not a whole number from 0 on"),
        (["save", "x"], "in Python: treering.save(path, tree)"),
        (["load", "x"], "in Python: treering.load(path)"),
        (["help", "nope"], "there is no verb 'nope'"),
        (["cat", "x", "w", "--npy", "--json"], "--npy and --json exclude each other"),
        (["cat", "x", "w", "--npy", "--all"], "--npy and --all exclude each other"),
        (["report", "x", "--port", "0"], "--port is that of --serve"),
        (["report", "x", "--serve", "-o", "report.html"], "--serve and -o exclude each other"),
        (["report", "x", "--serve", "--overwrite"], "--serve and --overwrite exclude each other"),
    ],
)
def test_wrong_arguments_are_one_line_and_a_hint(arguments: list[str], wanted: str) -> None:
    lines = treering(*arguments, code=2).stderr.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("error: ")
    assert wanted in lines[0]
    assert lines[1].startswith("hint: ")


def end_with(monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int) -> str:
    """Run a verb that raises; assert the exit code and return what stands on stderr."""

    faults.fail(monkeypatch, click.Command, "invoke", error)
    done = here("inspect", "x", code=code)
    assert done.stdout == ""
    return done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CorruptError("broken", path=("a",), offset=3, hint="take another"), 1),
        (NotFoundError("gone", hint="take another"), 2),
        (UnsupportedError("odd", hint="take another"), 2),
        (StoreError.of(PermissionError(13, "Permission denied"), "x", "read", hint="take another"), 2),
    ],
)
def test_every_error_is_two_lines(monkeypatch: pytest.MonkeyPatch, error: TreeringError, code: int) -> None:
    lines = end_with(monkeypatch, error, code).splitlines()
    assert lines[1:] == ["hint: take another"]
    assert lines[0] == f"error: {str(error).removesuffix('; take another')}"


@pytest.mark.parametrize("verb", ["inspect", "ls", "cat", "convert"])
def test_a_gzip_file_that_is_cut_short_is_damaged(tmp_path: Path, verb: str) -> None:
    path = tmp_path / "state.msgpack.gz"
    path.write_bytes(package.serialization.to_compressed_bytes({"w": list(range(100))})[:-9])
    more = {"cat": ["w/3"], "convert": [str(tmp_path / "new")]}.get(verb, [])
    lines = here(verb, str(path), *more, code=1).stderr.splitlines()
    assert re.fullmatch(r"error: .*the gzip data is cut short \(at byte \d+\)", lines[0])
    assert len(lines) == 2


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    assert end_with(monkeypatch, KeyboardInterrupt(), 130).strip() == "error: stopped"


def test_ctrl_c_during_the_start() -> None:
    # The import of click is the first thing that takes time; there the user's Ctrl-C meets it.
    command = """
import sys

class Interrupted:
    def find_spec(self, name, path, target=None):
        if name == "click":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted())
import runpy
runpy.run_module("treering", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: stopped\n")


def test_an_error_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = end_with(monkeypatch, ZeroDivisionError("ours"), 2).splitlines()
    assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", "ZeroDivisionError: ours")


@pytest.mark.skipif(sys.platform == "win32", reason="a shell of POSIX")
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_the_caller_closed(checkpoint: Path, closed: str) -> None:
    for path, code in ((checkpoint, 0), (checkpoint / "nope", 2)):
        command = f'"$1" -m treering verify "$2" {closed}'
        done = subprocess.run(
            ["/bin/sh", "-c", command, "sh", sys.executable, str(path)], capture_output=True, text=True, check=False
        )
        assert done.returncode == code
        assert "Traceback" not in done.stderr


class Terminal(io.StringIO):
    """A terminal of ASCII that keeps what it shows."""

    encoding = "ascii"

    def isatty(self) -> bool:
        return True


def test_colors_only_where_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def error() -> str:
        stderr = Terminal()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stderr)
            ended("inspect", "\xe9\x1b")
        return stderr.getvalue()

    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert error().startswith("\x1b[1;31merror:\x1b[0m ")
    assert "\\xe9\\x1b" in error()
    monkeypatch.setenv("TERM", "dumb")
    assert error().startswith("error: ")
    assert "\x1b" not in error()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert error().startswith("error: ")


def test_the_module_is_the_command() -> None:
    assert (Path(sys.modules["treering"].__file__ or "").parent / "__main__.py").exists()
    assert treering(code=2).stderr.startswith("Usage: ")


def completion(**environment: str) -> str:
    """Return what the program answers to a shell that completes, which finds it by its name."""
    command = "import runpy, sys; sys.argv[0] = 'treering'; runpy.run_module('treering', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", command], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize(
    ("typed", "completed"),
    [("treering ver", "verify"), ("treering doctor --e", "--env"), ("treering ls checkpoint --js", "--json")],
)
def test_a_shell_completes_verbs_and_options(typed: str, completed: str) -> None:
    count = str(typed.count(" "))
    answer = completion(_TREERING_COMPLETE="bash_complete", COMP_WORDS=typed, COMP_CWORD=count)
    assert answer == f"plain,{completed}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_what_a_shell_reads_for_that(shell: str) -> None:
    assert f"_TREERING_COMPLETE={shell}_complete" in completion(_TREERING_COMPLETE=f"{shell}_source")
