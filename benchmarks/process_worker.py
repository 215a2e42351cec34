"""One process of a crew: ``python -m benchmarks.process_worker NUMBER COUNT PORT``; asked and answering line by line.

Each line on the input is ``[verb, arguments]`` for ``process_station.Station``, each answer ``{"answer": ...}`` or
``{"error": text}``. The process ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

__all__ = ["main", "share_of_cores"]


def share_of_cores(cores: list[int], number: int, count: int) -> list[int]:
    """The cores that one of so many processes may use: its share of them, at least one.

    Example:
        >>> share_of_cores([0, 1], 0, 1), share_of_cores([0, 1], 1, 2), share_of_cores([0, 1], 2, 4)
        ([0, 1], [1], [0])
    """
    if count >= len(cores):
        return [cores[number % len(cores)]]
    return cores[number * len(cores) // count : (number + 1) * len(cores) // count]


def main(number: int, count: int, port: int) -> None:
    """Join the job, then answer until the input ends."""
    # What others print, and what jax prints of itself, must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if hasattr(os, "sched_setaffinity"):
        # Before any library counts the cores to see how many threads it wants.
        os.sched_setaffinity(0, share_of_cores(sorted(os.sched_getaffinity(0)), number, count))
    import jax

    from benchmarks.process_station import Station
    from benchmarks.workloads import DEVICES

    jax.config.update("jax_num_cpu_devices", DEVICES // count)
    if count > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", count, number)
    station = Station()
    print(json.dumps({"answer": len(jax.devices())}), file=answers, flush=True)
    for line in sys.stdin:
        verb, arguments = json.loads(line)
        try:
            answer = {"answer": getattr(station, verb)(*arguments)}
        except Exception as error:  # noqa: BLE001 - whoever asked decides what it means
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    # jax's own way out waits for the other processes.
    os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
