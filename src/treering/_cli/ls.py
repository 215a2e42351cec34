"""``treering ls``: the leaves of a checkpoint, leaves directory or file, or the steps of a run, one a line."""

from __future__ import annotations

import sys

import click

from treering._cli.output import nothing_matches, write_lines
from treering._cli.run_path import is_run, latest_of
from treering._cli.terminal import GOOD, look_of
from treering._inspect.inspect import listing_of
from treering._values.keys import Glob
from treering._view.flat import leaves_of
from treering._view.key_lines import key_json, key_lines
from treering._view.listing_json import origin_members


@click.command(
    epilog="\b\nExamples:\n"
    "  treering ls checkpoint\n"
    "  treering ls checkpoint 'params/**/kernel'\n"
    "  treering ls model.safetensors --json | jq -r '.leaves[].key'\n"
)
@click.argument("path", type=click.Path(path_type=str))
@click.argument("globs", metavar="[GLOB]...", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="One JSON object for programs, with plain numbers.")
def ls(path: str, globs: tuple[str, ...], as_json: bool) -> int:
    """List the leaves in PATH, one a line: key, dtype, shape or value, bytes; of a run its steps.

    PATH is a checkpoint's folder, a leaves directory, a safetensors file or a msgpack file. With GLOBs only the leaves
    that one of them matches, and everything below a branch that one matches: * is any run inside a part of a key, **
    any number of parts. Quote them, or the shell expands them. Of a run its steps are listed, with GLOBs the leaves of
    the latest one.
    """
    if not globs and is_run(path):
        return _steps(path, as_json=as_json)
    path = latest_of(path)
    patterns = [Glob.parse(glob) for glob in globs]
    listing = listing_of(path)
    leaves = list(leaves_of(listing.root, patterns))
    if as_json:
        write_lines(key_json(leaves, title=path, globs=globs, origin=origin_members(listing)))
    else:
        write_lines(key_lines(leaves, look_of(sys.stdout)))
    return GOOD if leaves or not globs else nothing_matches(path, globs, listing.root)


def _steps(path: str, *, as_json: bool) -> int:
    from treering._runs.reports import listed_run
    from treering._view.run_json import steps_json
    from treering._view.run_text import step_lines

    listing = listed_run(path)
    write_lines(steps_json(listing) if as_json else step_lines(listing, look_of(sys.stdout)))
    return GOOD
