"""A program that begins to save and ends, in one of the ways in which programs end; many times, as forks of one.

The first argument is a folder. The others name ways, sizes and how many of each. What each fork writes on stderr, and
its status, is told in lines of JSON.
"""

import atexit
import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

# For all forks at once: `save_async` imports it when it is called.
import treering._checkpoint.save  # noqa: F401
from treering.checkpoint import save_async

SIZES = {"small": 64, "large": 4 << 20}
"""Items of 8 bytes of each size."""
REFUSED = "a progress that fails"


def tree(size: str) -> dict[str, object]:
    """Return what is saved: numpy alone where it is small, for which no device is started."""
    more = {} if size == "small" else {"jax": jnp.arange(1000)}
    return {"numpy": np.arange(SIZES[size]), "step": 7, **more}


def fails(done: int, total: int) -> None:
    """Be a progress that lets a save fail."""
    raise RuntimeError(REFUSED)


def stands(done: int, total: int) -> None:
    """Be a progress that lets a save stand still."""
    threading.Event().wait()


def terminates(times: int, then: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """Be a progress that ends the program while it waits at its end, as often as said."""
    left = [signal.SIGTERM] * times

    def progress(done: int, total: int) -> None:
        while left:
            time.sleep(0.3)  # until the program waits, or until it has heard
            os.kill(os.getpid(), left.pop())
        time.sleep(0.3)
        then(done, total)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    return progress


def begin(path: str, size: str, progress: Callable[[int, int], object] | None = None) -> None:
    """Save, and do not wait."""
    save_async(path, tree(size), progress=progress)


def end(way: str, path: str, size: str) -> None:  # noqa: C901, PLR0912, PLR0915 - one way after the other
    """Save in a way of ending."""
    match way:
        case "falls off":
            begin(path, size)
        case "exception":
            begin(path, size)
            raise ValueError("the program has failed")
        case "sys.exit":
            begin(path, size)
            sys.exit(0)
        case "sys.exit(3)":
            begin(path, size)
            sys.exit(3)
        case "exit handler":
            atexit.register(begin, path, size)
        case "exit handler, before the first save":
            atexit.register(begin, path, size)
            save_async(f"{path} first", tree("small"))
        case "exit handler, after the first save":
            save_async(f"{path} first", tree("small"))
            atexit.register(begin, path, size)
        case "thread":
            threading.Thread(target=begin, args=(path, size)).start()
        case "thread, at the end":
            threading.Thread(target=_begin_late, args=(path, size)).start()
        case "forked child" | "spawned child":
            started: Any = multiprocessing.get_context("fork" if way == "forked child" else "spawn")
            child = started.Process(target=begin, args=(path, size))
            child.start()
            child.join()
            sys.exit(child.exitcode)
        case "forked child that fails":
            child = multiprocessing.get_context("fork").Process(target=begin, args=(path, size, fails))
            child.start()
            child.join()
            sys.exit(child.exitcode)
        case "two":
            save_async(f"{path} first", tree(size))
            begin(path, size)
        case "garbage":
            begin(path, size)
            gc.collect()
            os.chdir("/")
        case "terminated":
            begin(path, size, terminates(1, lambda done, total: None))
        case "terminated twice":
            begin(path, size, terminates(2, stands))
        case "told":
            assert isinstance(save_async(path, tree(size), progress=fails).exception(), RuntimeError)
        case "fails":
            begin(path, size, fails)
        case "fails in an exit handler":
            atexit.register(begin, path, size, fails)
        case "fails, sys.exit(3)":
            begin(path, size, fails)
            sys.exit(3)
        case "fails, then an exit handler":
            atexit.register(print, "the exit handler of the program")
            begin(path, size, fails)
        case "stands":
            save_async(path, tree(size), progress=stands, timeout=1)
        case "stands, and one waits":
            save_async(f"{path} first", tree(size), progress=stands, timeout=1)
            begin(path, size)
        case "cancelled":
            save_async(f"{path} first", tree(size))
            save_async(path, tree(size)).cancel()
        case "no stderr":
            sys.stderr = None
            begin(path, size, fails)
        case _:
            raise LookupError(way)


def _begin_late(path: str, size: str) -> None:
    threading.main_thread().join()
    begin(path, size)


def _fork(folder: Path, name: str) -> int:
    """Return a child's number; 0 in the child, whose output goes into files."""
    pid = os.fork()
    if pid == 0:
        for descriptor, stream in ((1, "out"), (2, "err")):
            file = os.open(folder / f"{name}.{stream}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
            os.dup2(file, descriptor)
    return pid


def main() -> None:
    """Fork once for each case, two at a time; a fork ends as a program does, by coming to the end of this module."""
    folder, ways, sizes, count = Path(sys.argv[1]), sys.argv[2].split(";"), sys.argv[3].split(";"), int(sys.argv[4])
    cases = [(way, size, turn) for turn in range(count) for way in ways for size in sizes]
    running: dict[int, tuple[str, str, str]] = {}
    told = []
    try:
        while cases or running:
            while cases and len(running) < 3:
                way, size, turn = cases.pop()
                name = f"{way} {size} {turn}"
                pid = _fork(folder, name)
                if pid == 0:
                    running.clear()
                    end(way, str(folder / name), size)
                    return
                running[pid] = (way, size, name)
            pid, status = os.wait()
            way, size, name = running.pop(pid)
            found = {stream: (folder / f"{name}.{stream}").read_text() for stream in ("out", "err")}
            told.append(
                {
                    "way": way,
                    "size": size,
                    "path": str(folder / name),
                    "status": os.waitstatus_to_exitcode(status),
                    **found,
                }
            )
    finally:
        for pid in running:
            os.kill(pid, 9)
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main()
