"""The page of all public names is what its script makes of the signatures, and stays short."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import treering

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def one_page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_page", DOCS / "one_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_that_of_the_signatures(one_page: ModuleType) -> None:
    hint = "run python docs/one_page.py"
    assert (DOCS / "reference" / "api-on-one-page.md").read_text(encoding="utf-8") == one_page.page(), hint


def test_the_page_fits_two_screens(one_page: ModuleType) -> None:
    assert one_page.page().count("\n") <= 100


def test_every_name_of_the_root_is_on_the_page(one_page: ModuleType) -> None:
    text = one_page.page()
    assert [name for name in treering.__all__ if name != "__version__" and not re.search(rf"\b{name}\b", text)] == []


FUNCTIONS = {
    **{name: getattr(treering, name) for name in treering.__all__ if inspect.isfunction(getattr(treering, name))},
    **{f"Run.{name}": one for name, one in vars(treering.Run).items() if inspect.isfunction(one) and name[0] != "_"},
    "Run": treering.Run,
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_option_has_its_reason_in_the_docstring(name: str) -> None:
    function: Any = FUNCTIONS[name]
    options = {one.name for one in inspect.signature(function).parameters.values() if one.kind is one.KEYWORD_ONLY}
    said = set(re.findall(r"^ {4}(\w+): \S", inspect.getdoc(function) or "", re.MULTILINE))
    shared = treering.checkpoint.LoadKeywords.__annotations__ if name in ("Run.load", "load_async") else ()
    assert options - said - set(shared) == set()
