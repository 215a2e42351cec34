"""``treering inspect``: what is in a file, from its headers alone."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import click

from treering._cli.terminal import GOOD, NO, explain, look_of
from treering._format.records import Listing
from treering._ops.inspect import inspect_file
from treering._values.keys import Glob
from treering._view.listing_json import json_lines
from treering._view.rows import DEEPEST, USUAL_DEPTH, lay_out
from treering._view.tree_text import tree_lines
from treering.errors import Corrupt, Format

__all__ = ["inspect"]

_LINES_A_WRITE = 500
_OTHER_FORMS = {
    b"PK\x03\x04": "a zip archive (as .npz files and PyTorch checkpoints are)",
    b"\x93NUMPY": "a .npy file",
    b"\x89HDF\r\n": "an HDF5 file",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
    b'{"': "a JSON text",
}


@click.command(
    epilog="\b\nExamples:\n"
    "  treering inspect state.msgpack\n"
    "  treering inspect state.msgpack --depth 1\n"
    "  treering inspect state.msgpack 'params/**/kernel'\n"
    "  treering inspect state.msgpack --json | python -m json.tool\n"
)
@click.argument("file", type=click.Path(path_type=str))
@click.argument("globs", metavar="[GLOB]...", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="One JSON object for programs, with plain numbers.")
@click.option(
    "--depth",
    type=click.IntRange(0, DEEPEST),
    default=USUAL_DEPTH,
    show_default=True,
    metavar="N",
    help="Fold branches deeper than N levels into their totals.",
)
def inspect(file: str, globs: tuple[str, ...], as_json: bool, depth: int) -> int:
    """Show the tree in FILE: dtype, shape and size of every leaf, totals of every branch.

    Only headers are read, so a file of any size takes a moment. With GLOBs only the leaves that one of them
    matches are shown, and everything below a branch that one matches: * is any run inside a part of a key, ** any
    number of parts. Quote them, or the shell expands them.
    """
    patterns = [Glob.parse(glob) for glob in globs]
    listing = _listing_of(file)
    layout = lay_out(listing.root, globs=patterns, depth=depth)
    size = listing.file_bytes
    if as_json:
        lines: Iterator[str] = json_lines(layout, title=file, file_bytes=size, globs=globs, depth=depth)
    else:
        lines = tree_lines(layout, title=file, file_bytes=size, look=look_of(sys.stdout))
    _write(lines)
    if layout.rows:
        return GOOD
    explain(
        f"nothing in {file!r} matches {' or '.join(map(repr, globs))}",
        "'*' stays inside one part of a key; '**/NAME' looks at every depth",
    )
    return NO


def _listing_of(file: str) -> Listing:
    """Read a file's headers; a file of some other well-known form is called by its name."""
    try:
        return inspect_file(file)
    except (Corrupt, Format) as error:
        form = _other_form(file)
        if form is None:
            raise
        raise Format(
            f"{file!r} is {form}, not msgpack", hint="this version reads msgpack, also in gzip form"
        ) from error


def _other_form(file: str) -> str | None:
    """Recognise a file by its first bytes; each form's specification fixes them."""
    with Path(file).open("rb") as opened:
        first = opened.read(16)
    for magic, form in _OTHER_FORMS.items():
        if first.startswith(magic):
            return form
    # safetensors: the length of a JSON header, little-endian in eight bytes, then the header.
    return "a safetensors file" if first[6:9] == b"\0\0{" else None


def _write(lines: Iterable[str]) -> None:
    """Write lines to stdout, some hundred at a time; what its encoding lacks comes out as an escape."""
    left = iter(lines)
    encoding = sys.stdout.encoding or "ascii"
    while batch := list(islice(left, _LINES_A_WRITE)):
        text = "\n".join(batch) + "\n"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
