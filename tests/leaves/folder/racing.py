"""Savers and readers of one leaves directory at the same time, forked or in threads."""

import functools
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.leaves.folder.directories import Tree, everything, expected, load, save
from tests.store.racing import answer_of, forked

SAVERS = 3


def tree(number: int, turn: int) -> Tree:
    """What a saver saves in its turn: by turns a leaf and a branch, with more leaves or fewer."""
    below = {f"p{number}/a": b"%04d" % turn * (turn % 5)}
    if turn % 2:
        below = {f"p{number}/a/{leaf}": b"%d" % turn for leaf in range(turn % 4 + 1)}
    return below | {f"p{number}/z": b"%d" % turn}


def saver(path: Path, number: int, turns: int) -> str:
    for turn in range(turns):
        save(path, tree(number, turn), prefix=f"p{number}")
        if load(path, f"p{number}") != tree(number, turn):
            return f"saver {number} does not find turn {turn}"
    return "done"


def in_processes(path: Path, turns: int) -> list[str]:
    children = [forked(functools.partial(saver, path, number, turns)) for number in range(SAVERS)]
    return [answer_of(*child) for child in children]


def in_threads(path: Path, turns: int) -> list[str]:
    with ThreadPoolExecutor(SAVERS) as pool:
        return list(pool.map(lambda number: saver(path, number, turns), range(SAVERS)))


def reading(path: Path, turns: int) -> list[str]:
    """Read on and on while a child overwrites: every tree found is one that was saved, none older than the last."""
    save(path, tree(0, 0), prefix="p0")
    child, pipe = forked(lambda: saver(path, 0, turns))
    trees = [tree(0, turn) for turn in range(turns)]
    seen, wrong = 0, []
    while seen < turns - 1:
        found = load(path, "p0")
        if found not in trees[seen:]:
            wrong.append(f"after turn {seen}: {found}")
            break
        seen = trees.index(found)
    return [answer_of(child, pipe), *wrong]


def main(base: Path, turns: int) -> None:
    found = {"processes": in_processes(base / "processes", turns), "threads": in_threads(base / "threads", turns)}
    last = {f"p{number}": tree(number, turns - 1) for number in range(SAVERS)}
    wrong = [
        name
        for name in ("processes", "threads")
        if everything(base / name) != expected(last) or len(list((base / name / ".treering").iterdir())) != SAVERS
    ]
    sys.stdout.write(json.dumps({**found, "reading": reading(base / "read", 2 * turns), "wrong": wrong}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
