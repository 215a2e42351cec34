"""``treering diff``: what two checkpoints or files do not have in common."""

from __future__ import annotations

import click

from treering._cli.options import JSON, WholeNumber, read_latest, steps_at, verb
from treering._cli.terminal import GOOD, NO, NOT_DONE, explain, write_lines
from treering._inspect.diff import diff as compare
from treering._inspect.diff import sameness
from treering._store.resolve import is_seen
from treering._view.plain import json_document, members_of
from treering.errors import CorruptError


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
