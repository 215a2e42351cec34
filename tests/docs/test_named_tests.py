"""A page that says which test shows a thing names a test that is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)
NAMED = re.compile(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`")
# Where a page has tests of one file alone, it says so once.
OWN = re.compile(r"without a file is in `(tests/[\w/]+\.py)`")


def named_in(page: Path) -> list[tuple[str | None, str]]:
    text = page.read_text(encoding="utf-8")
    own = OWN.search(text)
    return [(file or (own[1] if own else None), test) for file, test in NAMED.findall(text)]


@pytest.mark.parametrize("page", [page for page in PAGES if named_in(page)], ids=lambda page: page.stem)
def test_every_test_that_a_page_names_is_there(page: Path) -> None:
    lost = [
        f"{file}::{test}"
        for file, test in named_in(page)
        if file is None or f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8")
    ]
    assert lost == []


def test_every_case_of_eformer_is_on_its_page() -> None:
    tests = re.findall(
        r"^def (test_\w+)", (ROOT / "tests/compat/test_eformer_defects.py").read_text("utf-8"), re.MULTILINE
    )
    named = {test for _, test in named_in(ROOT / "docs" / "guides" / "coming-from-eformer.md")}
    assert [test for test in tests if test not in named] == []
