"""The process that is fed: makes one input after the other, notes it where the watcher can see it, and judges."""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import json
import mmap
import random
import sys
import time
from pathlib import Path

from torture.doors import feed
from torture.mutate import mutated
from torture.seeds import seeds

__all__ = ["ROOM", "main"]

# The shared note: number of the input, its length, its bytes.
ROOM = 16 + (1 << 20) + 4096
_VIOLATIONS = 10


def main() -> None:
    """Feed inputs ``--first``, ``--first`` + 1, ... until the time is over; print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--start-from", type=Path)
    options = parser.parse_args()
    with (options.folder / "note").open("r+b") as file:
        note = mmap.mmap(file.fileno(), ROOM)
    starts = list(seeds(options.start_from).values())
    outcomes: collections.Counter[str] = collections.Counter()
    violations: list[dict[str, object]] = []
    number = options.first
    end = time.monotonic() + options.seconds
    while time.monotonic() < end and len(violations) < _VIOLATIONS:
        note[:16] = number.to_bytes(8) + bytes(8)
        source = random.Random(f"{options.seed}:{number}")
        data = mutated(source.choice(starts), source.choice(starts), source)
        note[16 : 16 + len(data)] = data
        note[8:16] = len(data).to_bytes(8)
        verdict = feed(data, source, options.folder / "scratch")
        outcomes[f"{verdict.door}: {verdict.outcome}"] += 1
        if verdict.violation is not None:
            violations.append(keep(data, number, f"{verdict.door}: {verdict.violation}", options.folder))
        number += 1
    sys.stdout.write(json.dumps({"next": number, "outcomes": outcomes, "violations": violations}) + "\n")


def keep(data: bytes, number: int, wrong: str, folder: Path) -> dict[str, object]:
    """Save an input that did what must not be done, and describe it."""
    path = folder / f"{hashlib.sha256(data).hexdigest()[:16]}.bin"
    with contextlib.suppress(OSError):
        path.write_bytes(data)
    return {"number": number, "wrong": wrong, "file": str(path), "bytes": len(data)}


if __name__ == "__main__":
    main()
