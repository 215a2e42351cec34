"""The pages of the reference, one for each public function and class, and one of the verbs and their options."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import click

import treering
from building.pages import DOCS
from treering._cli.main import cli

MODULES = ("run", "rules", "checkpoint", "serialization", "leaves", "sharding", "tree", "formats", "testing", "errors")
"""The public modules, in the order of the reference; what the root has is shown there."""
FOLDER = DOCS / "reference" / "api"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A public name."""

    module: str
    name: str
    value: Any

    @property
    def path(self) -> str:
        """How a program writes it: ``treering.rules.KeepSteps``."""
        return f"{self.module}.{self.name}"

    @property
    def summary(self) -> str:
        """The first sentence of its docstring."""
        return " ".join((inspect.getdoc(self.value) or "").partition("\n\n")[0].split())


@cache
def entries() -> dict[str, Entry]:
    """Return every public function and class by its path."""
    modules = [
        (treering.__name__, treering),
        *((f"treering.{one}", importlib.import_module(f"treering.{one}")) for one in MODULES),
    ]
    found = [Entry(path, name, getattr(module, name)) for path, module in modules for name in module.__all__]
    shown = [one for one in found if inspect.isclass(one.value) or inspect.isroutine(one.value)]
    return {one.path: one for one in shown if one.module == "treering" or one.name not in treering.__all__}


def write_pages() -> None:
    """Write the pages into ``docs/reference``; Sphinx reads them there, and nobody keeps them."""
    wanted = {FOLDER / f"{path}.rst": _page(entry) for path, entry in entries().items()}
    for path in FOLDER.glob("*.rst"):
        if path not in wanted:
            path.unlink()
    FOLDER.mkdir(exist_ok=True)
    for path, text in wanted.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:  # an unchanged page is not built again
            path.write_text(text, encoding="utf-8")


def markdown(name: str) -> str:
    """Return the page of a function or class as Markdown."""
    entry = entries()[name.rpartition("/")[2]]
    lines = [f"# {entry.path}", *_described(entry.path, entry.value)]
    if inspect.isclass(entry.value):
        for each, value in vars(entry.value).items():
            if each[0] != "_" and inspect.getdoc(value) and (inspect.isroutine(value) or isinstance(value, property)):
                lines += [f"## {entry.name}.{each}", *_described(each, value)]
    return "\n".join(lines).rstrip() + "\n"


def _described(name: str, value: Any) -> Iterator[str]:
    if callable(value):
        yield from ("", "```python", f"{name}{_signature(value)}", "```")
    yield from ("", inspect.getdoc(value) or "", "")


def _signature(value: Any) -> str:
    try:
        taken = inspect.signature(value)
    except ValueError:  # a class of the interpreter's, such as an error
        return "(...)"
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in taken.parameters.values()]
    return str(taken.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def _page(entry: Entry) -> str:
    kind = "autoclass" if inspect.isclass(entry.value) else "autofunction"
    title = f"{entry.path}\n{'=' * len(entry.path)}\n"
    bases = "   :show-inheritance:\n" if getattr(entry.value, "__bases__", (object,)) != (object,) else ""
    return f"{title}\n.. meta::\n   :description: {entry.summary}\n\n.. {kind}:: {entry.path}\n{bases}"


def names() -> str:
    """Return the list of all public names, by module, each with what it is for."""
    lines = []
    for module in dict.fromkeys(entry.module for entry in entries().values()):
        lines += [f"## {module}", "", *_module(module), "| name | what it is for |", "|---|---|"]
        lines += [
            f"| [`{entry.name}`](api/{entry.path}.rst) | {_cell(entry.summary)} |"
            for entry in sorted(entries().values(), key=lambda one: one.name.lower())
            if entry.module == module
        ]
        lines += [""]
    return "\n".join([*lines, "```{toctree}", ":hidden:", ":glob:", "", "api/*", "```", ""])


def _module(name: str) -> Iterator[str]:
    if name != treering.__name__:
        yield from ((inspect.getdoc(importlib.import_module(name)) or "").partition("\n\n")[0], "")


def verbs() -> str:
    """Return what ``--help`` of each verb says, from the program of the command line."""
    context = click.Context(cli, info_name="treering")
    lines: list[str] = []
    for verb in cli.list_commands(context):
        command = cli.get_command(context, verb)
        if command is not None:
            lines += _verb(verb, command, click.Context(command, info_name=verb, parent=context))
    return "\n".join(lines)


def _verb(verb: str, command: click.Command, context: click.Context) -> Iterator[str]:
    about = inspect.cleandoc(command.help or command.short_help or "").replace("\f", "")
    usage = " ".join(["treering", verb, *command.collect_usage_pieces(context)])
    yield from (f"## {verb}", "", *_paragraphs(about), "```text", usage, "```", "")
    rows = [
        record
        for one in command.get_params(context)
        if isinstance(one, click.Option) and (record := one.get_help_record(context))
    ]
    yield from ("| option | what it does |", "|---|---|")
    yield from (f"| `{option.replace('|', ' or ')}` | {_cell(text)} |" for option, text in rows)
    yield from ("", *_paragraphs(inspect.cleandoc(command.epilog or "")))


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a help text; one that click keeps as it is becomes a fence."""
    for part in text.split("\n\n"):
        if part.startswith("\b\n"):
            yield from ("```text", part[2:], "```", "")
        else:
            yield from (_cell(part), "")


def _cell(text: str) -> str:
    plain = " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")
    return re.sub(r"(?<![\w`-])--[\w-]+", r"`\g<0>`", plain)  # else one dash is made of the two of an option
