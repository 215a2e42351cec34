"""Write the page of all public names, ``docs/reference/api-on-one-page.md``: python docs/one_page.py."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import treering

PAGE = Path(__file__).parent / "reference" / "api-on-one-page.md"
_VERBS = (
    "save", "load", "open", "save_async", "load_async", "each", "export", "convert", "abstract", "inspect", "verify",
    "diff", "bucket",
)  # fmt: skip
_CLASSES = ("Run", "Fallback", "KeepLast", "KeepEvery", "KeepBest", "SaveEvery", "KeyMap", "KeyRule")
_MODULES = (
    "checkpoint", "run", "rules", "serialization", "leaves", "sharding", "tree", "formats", "testing", "errors",
)  # fmt: skip
_WIDTH = 118
_HEAD = """# The API on one page

Made by `python docs/one_page.py` from the signatures. The [reference](api.md) says what each option means.
"""
_REST = (
    "What else is public. Import `treering.formats` and `treering.testing` by name; `import treering` gives the rest, "
    "and `treering.retention` and `treering.cadence`, the earlier homes of names in `treering.rules`.\n"
)


def page() -> str:
    """Return the page."""
    verbs = [line for name in _VERBS for line in _verb(name, getattr(treering, name))]
    classes = [line for name in _CLASSES for line in _class(name, getattr(treering, name))]
    modules = [line for name in _MODULES for line in _module(name)]
    blocks = ["\n".join(["```text", *lines, "```", ""]) for lines in (verbs, classes)]
    return "\n".join([_HEAD, *blocks, _REST, *modules, ""])


def _entry(name: str, function: Any, *, indent: str = "") -> Iterator[str]:
    """Yield the signature of a function, without annotations."""
    taken = inspect.signature(function)
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in taken.parameters.values() if one.name != "self"]
    shown = str(taken.replace(parameters=plain, return_annotation=inspect.Signature.empty)).replace("'", '"')
    shown = re.sub(r"<Signals\.(\w+): \d+>", r"signal.\1", shown).replace("<factory>", "...")
    yield from _wrap(f"{indent}{name}{shown}", indent)


def _verb(name: str, function: Any) -> Iterator[str]:
    yield from _entry(name, function)
    text = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
    yield from _wrap(f"    {text}", "  ")


def _class(name: str, kind: type) -> Iterator[str]:
    yield from _entry(name, kind)
    methods = {one: found for one, found in vars(kind).items() if not one.startswith("_") and inspect.isroutine(found)}
    if kind is treering.Run:
        for method, function in methods.items():
            yield from _entry(f".{method}", function, indent="    ")


def _module(name: str) -> Iterator[str]:
    module = importlib.import_module(f"treering.{name}")
    names = [one for one in module.__all__ if one not in treering.__all__]
    yield from _wrap(f"- `treering.{name}`: {', '.join(names)}", "  ")


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=f"{indent}  ", break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}: {page().count(chr(10))} lines\n")
