"""``treering verify``: every byte compared with its checksum."""

from __future__ import annotations

from treering._cli.options import JSON, PATH, verb
from treering._cli.terminal import GOOD, NO, write_lines
from treering._inspect.verify import verify as check
from treering._printable import printable
from treering._view.plain import cut, json_document, members_of

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
