"""The demo's last chapter: one bit of the run is flipped, and everybody who reads it says where."""

from __future__ import annotations

import os
from pathlib import Path

from demo.evidence import Proof
from demo.stage import Stage, short
from treering._format.listing import LeafRecord
from treering._inspect.inspect import inspect, open_leaf_by_leaf
from treering._inspect.verify import verify
from treering._runs.steps import steps_of
from treering._values.checkpoint_names import step_name
from treering.errors import CorruptError


def break_it(stage: Stage) -> list[Proof]:
    """Flip a bit of the largest leaf of the latest step, look who notices, and flip it back."""
    stage.chapter(4, "Break it: flip one bit, and be told which leaf of which step it hit")
    folder = stage.run / step_name(max(steps_of(stage.run)))
    key, leaf = max(inspect(folder).leaves.items(), key=lambda item: item[1].nbytes)
    file, place = folder / str(leaf.file), (leaf.offset or 0) + leaf.nbytes // (2 * leaf.chunks)
    _flip_bit(file, place)
    try:
        found = verify(stage.run)
        complaint = complaint_of(folder, leaf)
    finally:
        _flip_bit(file, place)
    stage.say("Disks and networks damage data without a word. Each block has a checksum, so nobody gets wrong numbers.")
    stage.say(f"One bit of byte {place:,} of {folder.name}/{short(file.name)} is flipped.")
    stage.command("verify run", ())
    for finding in found.findings:
        stage.quote(str(finding).replace(file.name, short(file.name)), "yellow")
    stage.say("A load of that leaf raises:")
    stage.quote(complaint.replace(file.name, short(file.name)) or "no complaint", "yellow")
    mended = verify(stage.run).ok
    stage.say("The bit is flipped back, and the run is " + ("whole again." if mended else "still damaged."))
    told = [(finding.key, finding.file) for finding in found.findings]
    named = told == [(key, os.path.join(folder.name, file.name))]  # noqa: PTH118 - a text to compare with
    return [
        Proof(
            claim="A flipped bit is found and named",
            held=named and bool(complaint) and mended,
            detail=f"one of {8 * leaf.nbytes:,} bits of {key}" if named else f"{key} was hit, verify says {found}",
        )
    ]


def _flip_bit(file: Path, place: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ 1]))


def complaint_of(path: Path, leaf: LeafRecord) -> str:
    """Return the message of the error that reading a damaged leaf raises, empty when it raises none."""
    try:
        with open_leaf_by_leaf(path) as leaves:
            leaves.array(leaf)[...]
    except CorruptError as error:
        return f"CorruptError: {error}"
    return ""
