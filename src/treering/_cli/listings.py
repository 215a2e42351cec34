"""``treering inspect``, ``ls``, ``du``, ``verify``, ``diff``: what a checkpoint or file holds, and if it is whole."""

from __future__ import annotations

import dataclasses
import os
import sys

import click

from treering._checkpoint.detect import Form
from treering._checkpoint.forms import list_headers
from treering._cli.main import GOOD, NO, NOT_DONE, explain, note, write_lines
from treering._cli.options import (
    GLOBS,
    JSON,
    PATH,
    WholeNumber,
    depth,
    list_steps,
    nothing_matches,
    read_latest,
    steps_at,
    style_of,
    verb,
)
from treering._format.listing import describe_part
from treering._printable import printable
from treering._store.resolve import is_seen
from treering._values.checkpoint_names import step_of_name
from treering._view import listings
from treering._view.plain import cut, json_document, members_of
from treering._view.rows import USUAL_DEPTH, lay_out, leaves_of, weight_of
from treering._view.tree_text import tree_lines
from treering.errors import CorruptError

_USUAL_DU_DEPTH = 2
_LONGEST = 1000


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
        if listing.part:
            note(f"{path!r} is a part of a tree: {describe_part(listing.part)}")
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
    twice. Names, headers, checksums and compression are not counted. GLOBs select leaves as in treering ls.

    Steps of an incremental run share files: two names, or more, for the same bytes on the disk. A last line then says
    how many bytes the files of all steps have by their names, and how many there are; the difference is what sharing
    saves. In a bucket each step has its own copies, and a last line says what superseded data wait for readers.
    """
    run, (path, listing) = path, read_latest(path, list_headers)
    root = listing.root
    layout = lay_out(root, globs=globs, depth=depth)
    usage = listings.measure_usage(layout)
    usage = sorted(usage, key=lambda share: share[0]) if sort == "key" else usage
    waits = listing.notes if listing.form == Form.CHECKPOINT.value else ()
    if path != run and (step := step_of_name(os.path.basename(path))) is not None:  # noqa: PTH119 - a URL, perhaps
        from treering._runs.reports import sharing_of

        waits = [*waits, *filter(None, [sharing_of(run, step)])]
    if as_json:
        head = {"file": path, "globs": globs, "depth": depth}
        write_lines(listings.usage_json(layout, usage, head | {"notes": waits} if waits else head))
    elif layout.rows:
        write_lines(listings.usage_lines(layout, usage, ellipsis=style_of(sys.stdout).ellipsis))
        write_lines(waits)
    return GOOD if layout.rows else nothing_matches(path, globs, root)


@verb(
    "treering verify checkpoint",
    "treering verify checkpoint && cp -r checkpoint /backup/",
    "treering verify model.safetensors --json | jq .ok",
)
@PATH
@JSON
def verify(path: str, as_json: bool) -> int:
    """Read every byte of PATH and compare it with its checksums; every finding is one line.

    PATH is the folder of a checkpoint, a leaves directory, a safetensors file, a msgpack file, or a run, whose steps
    are all checked. Files of other programs, and msgpack, have no checksums: then only headers and sizes are checked,
    and the answer says so. A file that several steps of a run share is read once, and damage to it is damage to all of
    these steps, which the finding names. A step that a program holds, or that waits for on_commit, is checked like any
    other; verify holds and changes nothing. Exit code 0: PATH is whole; 1: it is damaged; 2: it could not be read.
    """
    from treering._inspect.verify import verify as check

    found = check(path, progress=True)
    if as_json:
        head = {"schema": "treering.verify/1"} | members_of(found, "path", "ok", "checked", "note", "leaves", "nbytes")
        head |= {} if found.steps is None else {"steps": found.steps}
        write_lines(json_document(head, findings=found.findings))
    else:
        lines = [str(found).splitlines()[0], *(f"  {finding}" for finding in found.findings)]
        if found.findings and found.note:
            lines.append(f"  note: {found.note}")
        write_lines(printable(cut(line, _LONGEST)) for line in lines)
    return GOOD if found.ok else NO


@verb(
    "treering diff before after",
    "treering diff before after --values",
    "treering diff run 100 200",
    "treering diff checkpoint model.safetensors",
    "treering diff before after --json | jq -r '.differences[].key'",
)
@click.argument("a", type=click.Path(path_type=str))
@click.argument("b", type=click.Path(path_type=str))
@click.argument("step", type=WholeNumber(0), required=False)
@click.option("--values", is_flag=True, help="Also read all arrays, and compare them bit for bit.")
@JSON
def diff(a: str, b: str, step: int | None, values: bool, as_json: bool) -> int:
    """Compare A and B: structure, kinds, dtypes, shapes, small values and metadata, one difference a line.

    With STEP, A is a run, and its steps B and STEP are compared.

    Each is the folder of a checkpoint, a leaves directory, a safetensors file, a msgpack file, or a run, whose latest
    step is compared; information that only one of the two forms stores is no difference. Exit code 0: they are the
    same; 1: they differ; 2: they could not be compared.
    """
    from treering._inspect.diff import diff as compare
    from treering._inspect.diff import sameness

    if step is not None and not b.isdecimal():
        raise click.UsageError(f"{b!r} is no number of a step")
    if step is None and b.isdecimal() and not is_seen(b):
        raise click.UsageError(f"there is no {b!r}; of a run, two steps are compared: treering diff RUN {b} STEP")
    if step is not None:
        a, b = steps_at(a, [int(b), step])
    try:
        found = read_latest(a, lambda a: read_latest(b, lambda b: compare(a, b, values=values, progress=True))[1])[1]
    except CorruptError as error:
        # Damage is no answer to this question.
        explain(str(error).removesuffix(f"; {error.hint}"), error.hint)
        return NOT_DONE
    if as_json:
        head = {"schema": "treering.diff/1"} | members_of(found, "a", "b", "values", "leaves") | {"same": not found}
        write_lines(json_document(head, differences=found))
    else:
        write_lines(map(str, found.differences) if found else [sameness(found, reading="--values")])
    return NO if found else GOOD
