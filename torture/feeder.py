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
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from torture.doors import Verdict, feed
from torture.mutate import mutated
from torture.seeds import seeds

__all__ = ["KINDS", "ROOM", "main"]

# The shared note: number of the input, its length, its bytes.
ROOM = 16 + (4 << 20) + 4096
_VIOLATIONS = 10
KINDS = {"msgpack": 70, "foreign": 20, "map": 10}
"""What is fed, and how often; one of other programs takes the time of many of msgpack."""


_Maker: TypeAlias = Callable[[random.Random], tuple[bytes, Callable[[], Verdict]]]
"""Makes an input, and what feeds it."""


def main() -> None:
    """Feed inputs ``--first``, ``--first`` + 1, ... until the time is over; print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--start-from", type=Path)
    parser.add_argument("--kinds", default=",".join(KINDS))
    options = parser.parse_args()
    with (options.folder / "note").open("r+b") as file:
        note = mmap.mmap(file.fileno(), ROOM)
    makers = {"msgpack": _msgpack, "foreign": _foreign, "map": _maps}
    kinds = options.kinds.split(",")
    made = {kind: makers[kind](options) for kind in kinds}
    weights = [KINDS[kind] for kind in kinds]
    outcomes: collections.Counter[str] = collections.Counter()
    violations: list[dict[str, object]] = []
    number = options.first
    end = time.monotonic() + options.seconds
    while time.monotonic() < end and len(violations) < _VIOLATIONS:
        note[:16] = number.to_bytes(8) + bytes(8)
        source = random.Random(f"{options.seed}:{number}")
        data, enter = made[source.choices(kinds, weights)[0]](source)
        note[16 : 16 + len(data)] = data
        note[8:16] = len(data).to_bytes(8)
        verdict = enter()
        outcomes[f"{verdict.door}: {verdict.outcome}"] += 1
        if verdict.violation is not None:
            violations.append(keep(data, number, f"{verdict.door}: {verdict.violation}", options.folder))
        number += 1
    sys.stdout.write(json.dumps({"next": number, "outcomes": outcomes, "violations": violations}) + "\n")


def _msgpack(options: argparse.Namespace) -> _Maker:
    starts = list(seeds(options.start_from).values())

    def make(source: random.Random) -> tuple[bytes, Callable[[], Verdict]]:
        data = mutated(source.choice(starts), source.choice(starts), source)
        return data, lambda: feed(data, source, options.folder / "scratch")

    return make


def _foreign(options: argparse.Namespace) -> _Maker:
    from torture.foreign_doors import feed_image, warm_up
    from torture.foreign_images import foreign_seeds
    from torture.foreign_mutate import mutated_image

    starts, folder = list(foreign_seeds().values()), options.folder / "tree"
    warm_up(foreign_seeds(), folder)

    def make(source: random.Random) -> tuple[bytes, Callable[[], Verdict]]:
        image = mutated_image(source.choice(starts), source)
        return image.pack()[: ROOM - 16], lambda: feed_image(image, source, folder)

    return make


def _maps(options: argparse.Namespace) -> _Maker:
    from torture.foreign_doors import feed_map, map_seeds
    from torture.foreign_mutate import mutated_map

    starts = map_seeds()

    def make(source: random.Random) -> tuple[bytes, Callable[[], Verdict]]:
        data = mutated_map(source.choice(starts), source)
        return data, lambda: feed_map(data, options.folder / "map")

    return make


def keep(data: bytes, number: int, wrong: str, folder: Path) -> dict[str, object]:
    """Save an input that did what must not be done, and describe it."""
    suffix = "tar" if data[257:262] == b"ustar" else "bin"
    path = folder / f"{hashlib.sha256(data).hexdigest()[:16]}.{suffix}"
    with contextlib.suppress(OSError):
        path.write_bytes(data)
    return {"number": number, "wrong": wrong, "file": str(path), "bytes": len(data)}


if __name__ == "__main__":
    main()
