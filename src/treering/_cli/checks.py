"""``treering verify`` and ``diff``: every byte compared with its checksum, and what two checkpoints differ in."""

from __future__ import annotations

import click

from treering._cli.options import JSON, PATH, WholeNumber, read_latest, steps_at, verb
from treering._cli.terminal import GOOD, NO, NOT_DONE, explain, write_lines
from treering._printable import printable
from treering._store.resolve import is_seen
from treering._view.plain import cut, json_document, members_of
from treering.errors import CorruptError

_LONGEST = 1000


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
    and the answer says so. Exit code 0: PATH is whole; 1: it is damaged; 2: it could not be read.
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
