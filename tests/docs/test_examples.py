"""Every example that a reader can see runs: the pages' Python fences and the docstrings' ``>>>`` lines."""

import doctest
import importlib
import re
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"

# ```python fences, with or without >>> in them; those of one page share their names, as a reader would type them.
SYBIL = Sybil([PythonCodeBlockParser(doctest_optionflags=doctest.ELLIPSIS), SkipParser()], path=str(ROOT))


def pages() -> list[str]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [str(page.relative_to(ROOT)) for page in found if page.exists() and "_build" not in page.parts]


def modules_with_examples() -> list[str]:
    found = [path for path in sorted(SOURCE.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]
    return [".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__") for path in found]


# What a text fence directly below an example shows is what the example prints; "..." stands for anything.
SHOWN = re.compile(r"\s*```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)


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
