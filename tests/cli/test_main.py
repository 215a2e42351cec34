"""The command itself: help, version, unknown verbs, one-line errors, exit codes."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import treering as package
from tests.cli.command import treering
from treering._cli import main as program
from treering._cli.terminal import can_show, plain_line, wants_color
from treering.errors import Corrupt, NotFound, StoreFailed, TreeringError, Unsupported


def test_help_has_every_verb_and_an_example() -> None:
    text = CliRunner().invoke(program.cli, ["--help"]).output
    for verb in ("demo", "inspect"):
        assert f"treering {verb}" in text


@pytest.mark.parametrize("verb", ["demo", "inspect"])
def test_each_verb_shows_examples(verb: str) -> None:
    result = CliRunner().invoke(program.cli, [verb, "--help"])
    assert result.exit_code == 0
    assert "Examples:" in result.output
    assert f"treering {verb}" in result.output


def test_the_version() -> None:
    assert treering("--version", code=0).stdout == f"treering {package.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["inspct", "x"], "there is no verb 'inspct'; did you mean 'inspect'?"),
        (["zzz"], "there is no verb 'zzz'"),
        (["inspect"], "Missing argument"),
        (["inspect", "x", "--depth", "201"], "not in the range"),
        (["demo", "--seconds", "soon"], "not a valid float"),
    ],
)
def test_wrong_arguments_are_one_line_and_a_hint(arguments: list[str], wanted: str) -> None:
    lines = treering(*arguments, code=2).stderr.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("error: ")
    assert wanted in lines[0]
    assert lines[1].startswith("hint: ")


def ended(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int | str | None:
    """Run the program with a verb that raises; answer its exit code."""

    @click.command()
    def fails() -> None:
        raise error

    monkeypatch.setattr(program.Verbs, "get_command", lambda *_: fails)
    monkeypatch.setattr(program.Verbs, "resolve_command", lambda _, __, args: (args[0], fails, args[1:]))
    with pytest.raises(SystemExit) as end:
        program.main(["fails"])
    return end.value.code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Corrupt("broken", path=("a",), offset=3, hint="take another"), 1),
        (NotFound("gone", hint="take another"), 2),
        (Unsupported("odd", hint="take another"), 2),
        (StoreFailed.of(PermissionError(13, "Permission denied"), "x", "read", hint="take another"), 2),
    ],
)
def test_every_error_is_two_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: TreeringError, code: int
) -> None:
    assert ended(monkeypatch, error) == code
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:] == ["hint: take another"]
    assert lines[0] == f"error: {str(error).removesuffix('; take another')}"


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr().err.strip() == "error: stopped"


def test_an_error_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        ended(monkeypatch, ZeroDivisionError())


def test_colors_only_where_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        encoding = "ascii"

        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    assert wants_color(terminal)  # type: ignore[arg-type]
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_color(terminal)  # type: ignore[arg-type]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_color(terminal)  # type: ignore[arg-type]
    assert not can_show("├", terminal)  # type: ignore[arg-type]
    assert plain_line("é\x1b", terminal) == "\\xe9\\x1b"  # type: ignore[arg-type]


def test_the_module_is_the_command() -> None:
    assert (Path(sys.modules["treering"].__file__ or "").parent / "__main__.py").exists()
    assert treering(code=2).stderr.startswith("Usage: ")
