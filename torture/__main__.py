"""The command line of the attacks."""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path
from typing import Any


def main() -> int:
    """Run one attack and return its exit code: 0 when treering held, 1 when not."""
    options = _parser().parse_args()
    seed = random.randrange(1 << 32) if getattr(options, "seed", None) is None else options.seed
    match options.attack:
        case "fuzz":
            from torture.feeder import KINDS
            from torture.fuzz import fuzz

            return fuzz(options.seconds, seed, options.start_from, options.kind or tuple(KINDS))
        case "quadratic":
            from torture.quadratic import quadratic

            return quadratic(options.case)
        case "flip":
            # One array lies in parts; read when jax starts.
            os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
            from torture.flip import flip

            return flip(options.processes, options.stride, options.random, seed)
        case "faults":
            from torture.failing import fail

            return fail(options.scene)
        case "power":
            from torture.power import power

            return power(options.cuts, options.moments, seed, options.peers, options.scene)
        case "processes":
            from torture.processes import processes

            return processes(options)
        case "schedules":
            from torture.schedules import schedules

            return schedules(
                options.schedules, seed, options.first, options.processes, options.jobs, store=options.store
            )
        case "run":
            from torture.run_kills import kill_runs

            return kill_runs(options.kills, seed, incremental=options.incremental, bucket=options.bucket)
        case "background":
            from torture.run_failures import fail_runs

            return fail_runs(options.scene, options.heard, options.stride)
        case "bucket":
            from torture.bucket import bucket

            return bucket(options, seed)
        case "interrupts":
            from torture.interrupts import interrupts

            return interrupts(options.count, seed, options.processes, options.scene)
        case _:
            from torture.kill import kill

            return kill(options.rounds, seed, options.scene)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m torture", description="Attack treering and see whether it holds.")
    attacks = parser.add_subparsers(dest="attack", required=True)
    fuzzing = attacks.add_parser("fuzz", help="damaged and hostile files, key maps, and trees of other programs")
    fuzzing.add_argument("--seconds", type=float, default=60.0, help="how long (60)")
    fuzzing.add_argument("--seed", type=int, default=None, help="the same seed gives the same inputs (random)")
    fuzzing.add_argument("--start-from", type=Path, default=None, help="a folder of msgpack (the golden files)")
    fuzzing.add_argument("--kind", action="append", help="msgpack, foreign or map; may be given again (all)")
    attacks.add_parser("quadratic", help="files that are to take quadratic time, at all readers").add_argument(
        "--case", action="append", help="a part of a case's name; may be given again (all)"
    )
    killing = attacks.add_parser("kill", help="kills at every call of a save, and at random times")
    killing.add_argument("--rounds", type=int, default=200, help="random kills (200)")
    killing.add_argument("--scene", action="append", help="one kind of save, by name; may be given again (all)")
    killing.add_argument("--seed", type=int, default=None, help="for the random times (random)")
    attacks.add_parser("faults", help="errors at every call of a save and of a load, and too little room").add_argument(
        "--scene", action="append", help="one kind of save, by name; may be given again (all)"
    )
    cutting = attacks.add_parser("power", help="power cuts after and during saves, on a real file system")
    cutting.add_argument("--cuts", type=int, default=20, help="cuts at the moment a save returns, each scene (20)")
    cutting.add_argument("--moments", type=int, default=100, help="cuts at random moments, each scene (100)")
    cutting.add_argument("--peers", type=int, default=3, help="cuts after saves of others, each of them (3)")
    cutting.add_argument(
        "--scene", action="append", help="one kind of save, by name; may be given again (nine of them)"
    )
    cutting.add_argument("--seed", type=int, default=None, help="for the random moments (random)")
    striking = attacks.add_parser("processes", help="kills and pauses of each process at each point")
    striking.add_argument("--scene", action="append", help="one kind of call, by name; may be given again (all)")
    striking.add_argument("--layer", action="append", help="forged or jax; may be given again (both)")
    striking.add_argument("--count", action="append", type=int, help="processes of a job; may be given again (2, 4)")
    striking.add_argument("--point", action="append", help="one point, by name; may be given again (all)")
    striking.add_argument("--action", action="append", help="kill, pause or slow; may be given again (all)")
    striking.add_argument("--replay", default=None, help="just one case, by the name that was printed")
    striking.add_argument("--deadline", type=float, default=2.0, help="seconds to wait for others (2)")
    striking.add_argument("--at-once", type=int, default=8, help="cases at once, most of them waiting (8)")
    meeting = attacks.add_parser(
        "schedules", help="how processes save together, simulated: kills, pauses, lost answers"
    )
    meeting.add_argument("--schedules", type=int, default=10_000, help="how many (10000)")
    meeting.add_argument("--seed", type=int, default=None, help="the same seed gives the same schedules (random)")
    meeting.add_argument("--first", type=int, default=0, help="number of the first one (0)")
    meeting.add_argument("--processes", type=int, default=None, help="virtual processes of each job (2 to 8, drawn)")
    meeting.add_argument("--jobs", type=int, default=1, help="processes of this machine that simulate (1)")
    meeting.add_argument(
        "--store",
        choices=("folder", "memory", "bucket", "file"),
        default="folder",
        help="a folder with locks, versions alone, a bucket that loses requests, a single file in one (folder)",
    )
    running = attacks.add_parser("run", help="kills of a training loop that saves in the background, and goes on")
    running.add_argument("--kills", type=int, default=500, help="how many (500)")
    running.add_argument("--seed", type=int, default=None, help="for the random times (random)")
    running.add_argument("--incremental", action="store_true", help="a loop whose steps share what did not change")
    running.add_argument("--bucket", action="store_true", help="in a bucket of a real server, instead of a folder")
    hearing = attacks.add_parser("background", help="errors and kills at every call of a save in the background")
    hearing.add_argument("--scene", action="append", help="one kind of save, by name; may be given again (all)")
    hearing.add_argument("--heard", action="append", help="result, the next call, the end; may be given again (all)")
    hearing.add_argument("--stride", type=int, default=1, help="only every so many-th call (1)")
    _add_more(attacks)
    return parser


def _add_more(attacks: Any) -> None:
    interrupting = attacks.add_parser("interrupts", help="interrupts at random moments of every public function")
    interrupting.add_argument("--count", type=int, default=20_000, help="how many (20000)")
    interrupting.add_argument("--processes", type=int, default=1, help="how many at once (1)")
    interrupting.add_argument("--scene", action="append", help="one call, by name; may be given again (all)")
    interrupting.add_argument("--seed", type=int, default=None, help="for the random moments (random)")
    striking = attacks.add_parser("bucket", help="a real server of objects: each fault at each request, kills, races")
    striking.add_argument("--scene", action="append", help="one thing that is done, by name; may be given again (all)")
    striking.add_argument("--fault", action="append", help="one fault, by its name in code; may be given again (all)")
    striking.add_argument("--stride", type=int, default=1, help="only every so many-th case; 0: none (1)")
    striking.add_argument("--jobs", type=int, default=4, help="cases at once, most of them waiting (4)")
    striking.add_argument("--kills", type=int, default=500, help="savers that are killed (500)")
    striking.add_argument("--races", type=int, default=1000, help="races of savers, readers and a collector (1000)")
    striking.add_argument("--seed", type=int, default=None, help="for the times of kills (random)")
    flipping = attacks.add_parser("flip", help="bit rot: every bit of what is small, random bits of what is larger")
    flipping.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="how many at once (all cores)")
    flipping.add_argument("--stride", type=int, default=1, help="flip every n-th bit of what is small (1)")
    flipping.add_argument("--random", type=int, default=2000, help="how many bits of each larger one (2000)")
    flipping.add_argument("--seed", type=int, default=None, help="for the random bits (random)")


if __name__ == "__main__":
    sys.exit(main())
