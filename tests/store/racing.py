"""Savers and readers of one path at the same time, forked from a process with one thread."""

import errno
import fcntl
import functools
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.store.checkpoints import folder_at, load, save, write
from treering.errors import BusyError, ExistsError, NotFoundError

SAVERS = 4


def no_locks(descriptor: object, operation: int) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def forked(work: Callable[[], str]) -> tuple[int, int]:
    """Start ``work`` in a child; return its process and where its answer can be read."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, work().encode())
        finally:
            os._exit(0)
    os.close(writer)
    return child, reader


def answer_of(child: int, reader: int) -> str:
    with os.fdopen(reader) as file:
        answer = file.read()
    os.waitpid(child, 0)
    return answer or "died"


def saver(path: Path, number: int, *, overwrite: bool) -> str:
    source = random.Random(number)
    time.sleep(source.random() * 0.002)
    try:
        with folder_at(path, overwrite=overwrite) as saving:
            index = write(saving, b"%d" % number)
            if source.random() < 0.3:
                return "gave up"
            saving.commit(index)
    except (BusyError, ExistsError) as error:
        return type(error).__name__
    return "won"


def race(path: Path, first: int, *, overwrite: bool, outcomes: Counter[str]) -> str | None:
    """Let savers run at once; return what is wrong with what they leave."""
    if overwrite:
        save(path, b"0")
    numbers = range(first, first + SAVERS)
    children = [forked(functools.partial(saver, path, number, overwrite=overwrite)) for number in numbers]
    answers = dict(zip(numbers, (answer_of(*child) for child in children), strict=True))
    outcomes.update(answers.values())
    won = [b"%d" % number for number, answer in answers.items() if answer == "won"]
    if len(won) > 1 and not overwrite:
        return f"two first saves won: {answers}"
    if not won and not overwrite:
        left = list(path.iterdir()) if path.exists() else []
        return f"nobody won, and {left} is left: {answers}" if left else None
    if load(path) not in (won or [b"0"]):
        return f"{load(path)!r} is there: {answers}"
    if len(list(path.iterdir())) != 3:
        return f"{sorted(path.iterdir())} is there: {answers}"
    return None


def reading(path: Path, versions: int) -> tuple[int, list[bytes]]:
    """Read again and again while a child overwrites; return how many were whole, and those that were not."""
    save(path, b"0" * 1000)

    def write_on() -> str:
        for version in range(1, versions):
            save(path, b"%d" % (version % 10) * 1000, overwrite=True)
        return "done"

    child, reader = forked(write_on)
    whole, mixed, last = 0, list[bytes](), b"%d" % ((versions - 1) % 10) * 1000
    while True:
        try:
            found = load(path)
        except NotFoundError as error:
            if Path(error.filename).name.startswith("data-"):  # replaced between the index and the files: read again
                continue
            raise
        if len(found) != 1000 or len(set(found)) != 1:
            mixed.append(found)
        whole += 1
        if found == last and os.waitpid(child, os.WNOHANG) != (0, 0):
            os.close(reader)
            return whole, mixed


def main(base: Path, rounds: int, locks: str) -> None:
    if locks == "no locks":
        fcntl.flock = no_locks
    outcomes: Counter[str] = Counter()
    wrong = [
        told
        for number in range(rounds)
        for overwrite in (False, True)
        if (told := race(base / f"{number}{overwrite}" / "a", 10 * number, overwrite=overwrite, outcomes=outcomes))
    ]
    whole, mixed = reading(base / "read", 10 * rounds)
    found = {"outcomes": outcomes, "wrong": wrong, "whole": whole, "mixed": [repr(one) for one in mixed]}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
