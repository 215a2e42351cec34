"""Every figure of speed or memory that README and the pages give is that of a run in ``benchmarks/results``."""

from __future__ import annotations

import importlib.util
import platform
import re
from datetime import date
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from packaging.requirements import Requirement

from benchmarks import figures

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_figures", ROOT / "docs" / "draw_figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_and_charts_are_those_of_the_runs(drawing: ModuleType) -> None:
    found = {path: path.read_text(encoding="utf-8") for path, _ in drawing.wanted()}
    differ = [str(path.relative_to(ROOT)) for path, text in drawing.wanted() if found[path] != text]
    said = [line for path, text in found.items() for line in drawing.differences(path.name, text)]
    assert (said, differ) == ([], []), "run python docs/draw_figures.py"
    assert ROOT / "README.md" in found


def test_another_number_is_noticed(drawing: ModuleType) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (table,) = [mark for mark in drawing.MARK.finditer(text) if mark["place"] == "table of checkpoints"]
    number = re.search(r"\d+(?:\.\d+)?x as long", table["text"])
    assert number is not None
    wrong = text.replace(number[0], "1000x as long")
    assert len(drawing.differences("README.md", wrong)) == 1
    assert drawing.written(wrong) == text
    inline = "takes <!-- figure: checkpoint; B; load; safetensors; times -->1000x<!-- end --> as long"
    assert "1000x" in drawing.differences("a page", inline)[0]
    with pytest.raises(KeyError, match="no case 'pickle'"):
        drawing.written("<!-- figure: checkpoint; B; load; pickle; times -->1x<!-- end -->")


# What a claim about speed or memory against something else looks like, in figures or in words for them.
CLAIM = re.compile(
    r"\b\d+(?:\.\d+)?(?:x| times) (?:as (?:long|fast|much|slow)|faster|slower|longer|less|the (?:time|speed))"
    r"|\b(?:tens|hundreds) of (?:micro|milli)seconds|\d (?:us|ms|µs) (?:a|each|per) "
    r"|\b(?:several|many|ten|two|three|four|five) times (?:faster|slower|as (?:fast|long))"
)


def test_no_page_claims_a_figure_that_is_not_marked(drawing: ModuleType) -> None:
    unmarked = []
    for page in drawing.pages():
        name = page.relative_to(ROOT)
        # Designs and the tables of the benchmarks give the figures of their day, with date, machine and versions.
        if name.parts[:2] in {("docs", "design"), ("docs", "spec")} or name.parts[0] in {"benchmarks", "CHANGELOG.md"}:
            continue
        text = drawing.MARK.sub("", page.read_text(encoding="utf-8"))
        text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        unmarked += [f"{name}: {found[0]!r}" for found in CLAIM.finditer(text)]
    assert unmarked == []


def test_a_mark_never_begins_a_line_with_other_words(drawing: ModuleType) -> None:
    # Markdown would take the whole line for HTML.
    for page in drawing.pages():
        for line in page.read_text(encoding="utf-8").splitlines():
            assert not (line.startswith("<!-- figure:") and not line.endswith(" -->")), f"{page}: {line}"


def pinned() -> dict[str, str]:
    """The versions of the newest Python, by package."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    environment = {"python_version": "3.13"}
    return {
        one.name: str(one.specifier)[2:] for one in wanted if one.marker is None or one.marker.evaluate(environment)
    }


@pytest.mark.parametrize("name", figures.kept())
def test_a_run_says_when_where_and_with_which_versions(name: str) -> None:
    made = dict(figures.machine(name))
    assert date.fromisoformat(made.pop("date")) <= date.today()  # noqa: DTZ011 - a day is near enough
    assert made.pop("command").startswith(f"python -m benchmarks {name} --json")
    assert platform.node() not in made.values()
    assert {"system", "processor", "cores", "memory", "load", "file system"} <= set(made)
    packages = {key: value for key, value in made.items() if key in pinned()}
    assert {"jax", "numpy"} <= set(packages)
    # Figures of older versions than those that are pinned are to be measured again.
    assert packages == {key: pinned()[key] for key in packages}
    assert "Python 3.13" in made["system"]


@pytest.mark.parametrize("name", figures.kept())
def test_no_result_of_a_run_was_wrong(name: str) -> None:
    assert figures.wrong(name) == []


def test_charts_are_well_formed_and_said_in_words(drawing: ModuleType) -> None:
    for name in drawing.DRAWN:
        root = ElementTree.fromstring((ROOT / "docs" / "figures" / name).read_text(encoding="utf-8"))
        space = "{http://www.w3.org/2000/svg}"
        titles = [root.findtext(f"{space}title"), root.findtext(f"{space}desc")]
        assert all(titles)
        assert root.get("aria-labelledby") == "title said"
        words = " ".join(text.text or "" for text in root.iter(f"{space}text"))
        assert "treering" in words
        for number in re.findall(r"[\d.]+ (?:ms|s)\b", titles[1] or ""):
            assert number in words
