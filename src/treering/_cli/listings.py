"""``treering inspect``, ``ls`` and ``du``: a checkpoint, leaves directory or file as its headers describe it."""

from __future__ import annotations

import dataclasses
import sys

import click

from treering._checkpoint.detect import Form
from treering._checkpoint.forms import list_headers
from treering._cli.options import GLOBS, JSON, PATH, depth, list_steps, read_latest, verb
from treering._cli.terminal import GOOD, note, nothing_matches, style_of, write_lines
from treering._view import listings
from treering._view.rows import USUAL_DEPTH, lay_out, leaves_of, weight_of
from treering._view.tree_text import tree_lines

_USUAL_DU_DEPTH = 2


@verb(
    "treering inspect checkpoint",
    "treering inspect checkpoint --depth 1",
    "treering inspect model.safetensors",
    "treering inspect state.msgpack 'params/**/kernel'",
    "treering inspect checkpoint --json | python -m json.tool",
)
@PATH
@GLOBS
@JSON
@depth(USUAL_DEPTH, "Fold branches deeper than N levels into their totals.")
def inspect(path: str, globs: tuple[str, ...], as_json: bool, depth: int) -> int:
    """Show the tree in PATH: dtype, shape and size of every leaf, totals of every branch.

    PATH is the folder of a checkpoint, a leaves directory, a safetensors file, a msgpack file, or a run, whose latest
    step is shown. Only headers are read, so the time does not depend on the size. GLOBs select leaves, and everything
    below a branch that one matches: * matches inside a part of a key, ** any number of parts. Quote them, or the shell
    expands them.
    """
    path, listing = read_latest(path, list_headers)
    layout = lay_out(listing.root, globs=globs, depth=depth)
    size = listing.file_bytes
    if as_json:
        head = {"file": path, "file_bytes": size, "globs": globs, "depth": depth}
        write_lines(listings.json_lines(layout, {**head, **listings.origin_members(listing)}))
    elif layout.rows:
        style, notes = style_of(sys.stdout), listings.notes_of(listing)
        write_lines(tree_lines(layout, title=path, file_bytes=size, style=style, notes=notes))
    return GOOD if layout.rows else nothing_matches(path, globs, listing.root)


@verb(
    "treering ls checkpoint",
    "treering ls checkpoint 'params/**/kernel'",
    "treering ls model.safetensors --json | jq -r '.leaves[].key'",
)
@PATH
@GLOBS
@click.option("--sort", type=click.Choice(["key", "bytes"]), default="key", help="The order; bytes: the largest first.")
@JSON
def ls(path: str, globs: tuple[str, ...], sort: str, as_json: bool) -> int:
    """List the leaves in PATH, one a line: key, dtype, shape or value, bytes; of a run, its steps.

    PATH is the folder of a checkpoint, a leaves directory, a safetensors file, a msgpack file or a run. GLOBs select
    leaves, and everything below a branch that one matches: * matches inside a part of a key, ** any number of parts.
    Quote them, or the shell expands them. With GLOBs, the leaves of the latest step of a run are listed.
    """
    if not globs and (run := list_steps(path)) is not None:
        from treering._view.run_text import step_lines, steps_json

        if sort == "bytes":
            run = dataclasses.replace(run, steps=sorted(run.steps, key=lambda step: -step.nbytes))
        write_lines(steps_json(run) if as_json else step_lines(run, style_of(sys.stdout)))
        for told in () if as_json else run.notes:
            note(told)
        return GOOD
    path, listing = read_latest(path, list_headers)
    leaves = list(leaves_of(listing.root, globs))
    if sort == "bytes":
        leaves.sort(key=lambda pair: -weight_of(pair[1])[0])
    if as_json:
        write_lines(listings.key_json(leaves, {"file": path, "globs": globs, **listings.origin_members(listing)}))
    else:
        write_lines(listings.key_lines(leaves, style_of(sys.stdout)))
    return GOOD if leaves or not globs else nothing_matches(path, globs, listing.root)


@verb("treering du checkpoint", "treering du checkpoint --depth 4", "treering du state.msgpack 'params/**' --depth 3")
@PATH
@GLOBS
@JSON
@click.option(
    "--sort", type=click.Choice(["bytes", "key"]), default="bytes", help="The order; bytes: the largest first."
)
@depth(_USUAL_DU_DEPTH, "Add up everything deeper than N levels.")
def du(path: str, globs: tuple[str, ...], as_json: bool, sort: str, depth: int) -> int:
    """Show where the bytes in PATH are: the branches N levels down and the leaves above them, the largest first.

    PATH is the folder of a checkpoint, a leaves directory, a safetensors file, a msgpack file, or a run, whose latest
    step is shown; treering log shows the bytes of every step. The lines add up to the total, and no byte is counted
    twice. Names, headers, checksums and compression are not counted. GLOBs select leaves as in treering ls. In a
    bucket, a last line says what superseded data wait for readers.
    """
    path, listing = read_latest(path, list_headers)
    root = listing.root
    layout = lay_out(root, globs=globs, depth=depth)
    usage = listings.measure_usage(layout)
    usage = sorted(usage, key=lambda share: share[0]) if sort == "key" else usage
    waits = listing.notes if listing.form == Form.CHECKPOINT.value else ()
    if as_json:
        head = {"file": path, "globs": globs, "depth": depth}
        write_lines(listings.usage_json(layout, usage, head | {"notes": waits} if waits else head))
    elif layout.rows:
        write_lines(listings.usage_lines(layout, usage, ellipsis=style_of(sys.stdout).ellipsis))
        write_lines(waits)
    return GOOD if layout.rows else nothing_matches(path, globs, root)
