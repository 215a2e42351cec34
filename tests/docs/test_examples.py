"""Every example that a reader can see runs: the pages' Python and console fences and the docstrings' ``>>>`` lines."""

import doctest
import importlib
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"

# A program that the page names in its first line is a file, which a console fence of the page starts.
PROGRAM = re.compile(r"# (\w+\.py)\n")
# `$ command`, with lines that are continued, and what it prints up to the next one.
COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
# A page starts the same program several times: what one has compiled, quickly rather than well, the next ones load from
# the folder of the page. They have one device, or as many as the command says.
COMPILED_ONCE = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
    "JAX_COMPILATION_CACHE_DIR": ".compiled",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


class Python(PythonEvaluator):
    """Runs a fence, or writes the program that it is."""

    def __call__(self, example: Example) -> None:
        if named := PROGRAM.match(example.parsed):
            Path(named[1]).write_text(example.parsed, encoding="utf-8")
        else:
            super().__call__(example)


def run_commands(example: Example) -> None:
    """Run each command of a console fence as a shell does; what is shown below it is what it prints."""
    clean = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    code = 0
    for command, shown in COMMAND.findall(example.parsed):
        done = subprocess.run(
            ["bash", "-c", f"(exit {code}); {command}\nexit $?"],  # `$?` is that of the command before
            env=clean | COMPILED_ONCE | {"PATH": path, "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=120,
            check=False,
        )
        code = done.returncode
        same = doctest.OutputChecker().check_output(shown, done.stdout, doctest.ELLIPSIS)
        assert same, f"{example.path} shows\n{shown}\nbelow `{command}`, which prints\n{done.stdout}"


# ```python fences, with or without >>> in them; those of one page share their names, as a reader would type them.
PYTHON = PythonCodeBlockParser(doctest_optionflags=doctest.ELLIPSIS)
PYTHON.codeblock_parser = CodeBlockParser("python", Python())
SYBIL = Sybil([PYTHON, CodeBlockParser("console", run_commands), SkipParser()], path=str(ROOT))


def pages() -> list[str]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [str(page.relative_to(ROOT)) for page in found if page.exists() and "_build" not in page.parts]


def modules_with_examples() -> list[str]:
    found = [path for path in sorted(SOURCE.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]
    return [".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__") for path in found]


@pytest.fixture(autouse=True)
def usual_level() -> Iterator[None]:
    """A page may show how to turn the logger up; tests that come after it find it as it was."""
    logger = logging.getLogger("treering")
    level = logger.level
    yield
    logger.setLevel(level)


# What a text fence directly below an example shows is what the example prints; "..." stands for anything.
SHOWN = re.compile(r"\s*```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("page", pages())
def test_page(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / page).read_text(encoding="utf-8")
    for example in SYBIL.parse(ROOT / page):
        example.evaluate()
        printed = capsys.readouterr().out
        if shown := SHOWN.match(text, example.region.end):
            same = doctest.OutputChecker().check_output(shown[1], printed, doctest.ELLIPSIS)
            assert same, f"{page} shows\n{shown[1]}\nbut the example prints\n{printed}"


@pytest.mark.sampled(11)
@pytest.mark.parametrize("name", modules_with_examples())
def test_docstrings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    report: list[str] = []
    for example in doctest.DocTestFinder(exclude_empty=True).find(module):
        # Each docstring starts in a folder of its own: the files of one are not there for the next.
        folder = tmp_path / re.sub(r"\W", "_", example.name)
        folder.mkdir()
        monkeypatch.chdir(folder)
        runner.run(example, out=report.append)
    assert runner.failures == 0, "".join(report)
    assert runner.tries > 0, f"{name} has >>> lines that doctest does not find; are they outside a docstring?"
