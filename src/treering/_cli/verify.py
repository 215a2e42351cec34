"""``treering verify``: every byte compared with its checksum."""

from __future__ import annotations

from collections.abc import Iterator

import click

from treering._cli.output import write_lines
from treering._cli.terminal import GOOD, NO
from treering._format.findings import Verification
from treering._inspect.verify import verify as check
from treering._view.listing_json import json_text
from treering._view.plain import visible

_LONGEST = 1000


@click.command(
    epilog="\b\nExamples:\n"
    "  treering verify checkpoint\n"
    "  treering verify checkpoint && cp -r checkpoint /backup/\n"
    "  treering verify model.safetensors --json | jq .ok\n"
)
@click.argument("path", type=click.Path(path_type=str))
@click.option("--json", "as_json", is_flag=True, help="One JSON object for programs.")
def verify(path: str, as_json: bool) -> int:
    """Read every byte of PATH and compare it with its checksums; every damaged place is one line.

    PATH is a checkpoint's folder, a leaves directory, a safetensors file, a msgpack file, or a run, of which every step
    is checked. What another program wrote, and msgpack, has no checksums: then only headers and sizes are checked, and
    the answer says so. Exit code 0: nothing is wrong; 1: it is damaged; 2: it could not be read.
    """
    found = check(path, progress=True)
    if as_json:
        write_lines(_json_lines(found))
    else:
        lines = [str(found).splitlines()[0], *(f"  {finding}" for finding in found.findings)]
        if found.findings and found.note:
            lines.append(f"  note: {found.note}")
        write_lines(visible(line, _LONGEST).replace("\\\\", "\\") for line in lines)
    return GOOD if found.ok else NO


def _json_lines(found: Verification) -> Iterator[str]:
    head = {
        "schema": "treering.verify/1",
        "path": found.path,
        "ok": found.ok,
        "checked": found.checked,
        "note": found.note,
        "leaves": found.leaves,
        "nbytes": found.nbytes,
    }
    if found.steps is not None:
        head["steps"] = found.steps
    yield json_text(head)[:-1] + ","
    yield ' "findings": ['
    for place, finding in enumerate(found.findings, 1):
        members = {
            "key": finding.key,
            "file": finding.file,
            "start": finding.start,
            "stop": finding.stop,
            "problem": finding.problem,
        }
        yield f"  {json_text(members)}{',' if place < len(found.findings) else ''}"
    yield " ]}"
