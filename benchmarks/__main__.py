"""Command line: ``python -m benchmarks NAME [--json] [--rounds N] [--only A,B,C] [--size FACTOR] [--dir DIR]``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from benchmarks import report, scale, suite
from benchmarks.workloads import LeafKind, ask_for_devices

_NAMES = (
    "bucket", "checkpoint", "convert", "incremental", "leaves", "many", "msgpack", "plans", "processes", "run", "scale",
    "walk",
)  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    """The options of every benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=sys.modules[__name__].__doc__)
    parser.add_argument("benchmark", choices=_NAMES)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds of each group (default 5; short ones take a multiple)"
    )
    parser.add_argument("--only", default="", help="workloads, with commas between (default: all)")
    parser.add_argument("--leaves", default="numpy,jax", help="kinds of leaves, with commas between")
    parser.add_argument("--groups", default="", help="only groups whose names begin so, with commas between")
    parser.add_argument("--size", type=float, default=1.0, help="factor on the bytes of every workload")
    parser.add_argument("--dir", type=Path, help="folder on the disk to measure (default: a temporary one)")
    parser.add_argument("--no-memory", action="store_true", help="leave the peaks out; they take about as long again")
    parser.add_argument("--peak-of", nargs=2, metavar=("GROUP", "CASE"), help=argparse.SUPPRESS)
    return parser


def _words(text: str) -> tuple[str, ...]:
    """The words of a list with commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark and print its report; 1 if a result was wrong."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["scale"]:  # it times no cases: its options are others
        return scale.main(arguments[1:])
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if arguments[:1] == ["walk"]:  # and this one counts calls
        from benchmarks import walk

        return walk.main(arguments[1:])
    if arguments[:1] == ["incremental"]:  # and this one compares saves in a chain
        from benchmarks import incremental

        return incremental.main(arguments[1:])
    parser = _parser()
    given = parser.parse_args(arguments)
    benchmark = suite.load(given.benchmark)
    only = _words(given.only) or benchmark.workloads
    leaves = tuple(kind for kind in get_args(LeafKind) if kind in _words(given.leaves))
    if given.rounds < 1 or not leaves or not set(only) <= set(benchmark.workloads):
        parser.error(f"workloads are {', '.join(benchmark.workloads)}; leaves are numpy, jax; rounds are at least 1")
    if set(only) & set(benchmark.meshes):
        ask_for_devices()
    with tempfile.TemporaryDirectory(prefix="benchmarks-", dir=given.dir) as folder:
        options = suite.Options(
            rounds=given.rounds,
            only=only,
            leaves=leaves,
            groups=_words(given.groups),
            size=given.size,
            folder=Path(given.dir if given.peak_of else folder),
            memory=not given.no_memory,
            command=shlex.join(["python", "-m", "benchmarks", *arguments]),
        )
        if given.peak_of:
            group, case = given.peak_of
            suite.serve_peak(benchmark, group, case, options)
            return 0
        result = suite.run(benchmark, options)
    print(report.as_json(result) if given.json else report.as_text(result))
    return 1 if result.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
