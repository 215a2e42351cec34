"""The command line of the attacks."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path


def main() -> int:
    """Run one attack and return its exit code: 0 when treering held, 1 when not."""
    parser = argparse.ArgumentParser(prog="python -m torture", description="Attack treering and see whether it holds.")
    attacks = parser.add_subparsers(dest="attack", required=True)
    fuzzing = attacks.add_parser("fuzz", help="damaged and hostile msgpack files")
    fuzzing.add_argument("--seconds", type=float, default=60.0, help="how long (60)")
    fuzzing.add_argument("--seed", type=int, default=None, help="the same seed gives the same inputs (random)")
    fuzzing.add_argument("--start-from", type=Path, default=None, help="a folder of files (the golden files)")
    killing = attacks.add_parser("kill", help="kills and errors at every call of a save, and at random times")
    killing.add_argument("--rounds", type=int, default=200, help="random kills (200)")
    killing.add_argument("--scene", action="append", help="one kind of save, by name; may be given again (all)")
    killing.add_argument("--seed", type=int, default=None, help="for the random times (random)")
    options = parser.parse_args()
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    if options.attack == "fuzz":
        from torture.fuzz import fuzz

        return fuzz(options.seconds, seed, options.start_from)
    from torture.kill import kill

    return kill(options.rounds, seed, options.scene)


if __name__ == "__main__":
    sys.exit(main())
