"""Groups of the benchmark of many processes: throughput, bytes of each process, and what the processes' talk costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from benchmarks.measure import Case, Group
from benchmarks.process_peers import LibraryName
from benchmarks.process_scene import Counter, ProcessFiles, Turn
from benchmarks.process_trees import Layout

__all__ = ["FORMS", "ONE", "SHAPES", "Shape", "groups", "small_groups", "title"]

FORMS: tuple[LibraryName, ...] = ("treering", "leaves")
"""Our two forms: checkpoints, and leaves directories."""
ONE = "one process"
"""Name of the case that does the same with one process."""


def _share(turn: Turn, name: str) -> float:
    """Bytes of the busiest process over an equal share of them."""
    return max(turn.each(name)) * len(turn.done) / turn.nbytes if turn.done else float("nan")


def _total(turn: Turn, name: str) -> float:
    """Bytes of all processes together over the bytes that there are."""
    return sum(turn.each(name)) / turn.nbytes if turn.done else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One thing that processes do, whatever their number and the form."""

    what: str
    """What they do."""
    verb: Literal["save", "load"]
    """Whether they save or load."""
    layout: Layout
    """How the tree lies on their devices."""
    saved: Literal["sharded", "whole"] = "sharded"
    """What is loaded: what many processes saved, or one."""
    unit: str
    """What is counted."""
    counter: Counter
    """Counts it."""
    bound: float
    """It should be no more than this."""
    timed: bool
    """Whether it is compared with one process, for its throughput."""
    once: bool = False
    """Whether one round is enough."""


def _save(layout: Layout, *, total: bool) -> Shape:
    """What a save writes: by the busiest process, or by all of them."""
    return Shape(
        what=f"save {layout}" + (", all bytes" if total else ""),
        verb="save",
        layout=layout,
        unit="bytes written by all / unique" if total else "bytes written by the busiest / its share",
        counter=partial(_total if total else _share, name="written"),
        bound=1.005 if total else 1.10,
        timed=layout == "sharded" and not total,
        once=layout != "sharded" or total,
    )


SHAPES = (
    _save("sharded", total=False),
    Shape(
        what="load sharded",
        verb="load",
        layout="sharded",
        unit="bytes read by the busiest / needed",
        counter=partial(_share, name="read"),
        bound=1.05,
        timed=True,
    ),
    Shape(
        what="load rows of the whole",
        verb="load",
        layout="rows",
        saved="whole",
        unit="bytes read by the busiest / needed",
        counter=partial(_share, name="read"),
        bound=1.05,
        timed=False,
    ),
    Shape(
        what="load over the turned mesh",
        verb="load",
        layout="turned",
        unit="bytes read by all / unique",
        counter=partial(_total, name="read"),
        bound=1.05,
        timed=False,
    ),
    _save("replicated", total=False),
    _save("mixed", total=False),
    _save("sharded", total=True),
    _save("replicated", total=True),
    _save("mixed", total=True),
)
"""All that is done with the large tree."""


def title(form: LibraryName, what: str, count: int) -> str:
    """Name of a group of so many processes.

    Example:
        >>> title("treering", "save mixed", 4), title("leaves", "save mixed", 4)
        ('save mixed, 4 processes', 'leaves: save mixed, 4 processes')
    """
    return f"{what}, {count} processes" if form == "treering" else f"{form}: {what}, {count} processes"


def groups(scene: ProcessFiles) -> tuple[Group, ...]:
    """Every shape in both forms by each number of processes."""
    return tuple(_group(scene, form, shape, count) for form in FORMS for shape in SHAPES for count in scene.counts)


def _group(scene: ProcessFiles, form: LibraryName, shape: Shape, count: int) -> Group:
    return Group(
        name=title(form, shape.what, count),
        cases=tuple(_cases(scene, form, shape, count)),
        between=scene.files.clear,
        room=3 * scene.work.nbytes,
        once=shape.once,
        peaks=False,
        unit=shape.unit,
    )


def _cases(scene: ProcessFiles, form: LibraryName, shape: Shape, count: int) -> Iterator[Case]:
    """Ours, ours by one process where throughput counts, and Orbax beside checkpoints: it has one form."""
    yield _case(scene, "treering", count, form, shape)
    if shape.timed:
        yield _case(scene, ONE, 1, form, shape)
    if form == "treering":
        yield _case(scene, "Orbax", count, "Orbax", shape)
        if shape.timed:
            yield _case(scene, f"Orbax, {ONE}", 1, "Orbax", shape)


def _case(scene: ProcessFiles, name: str, count: int, library: LibraryName, shape: Shape) -> Case:
    if shape.verb == "save":
        return scene.save(name, count, library, shape.layout, counter=shape.counter)
    return scene.load(name, count, library, shape.layout, saved=shape.saved, counter=shape.counter)


# A small tree: what remains is what the processes say to each other.


def small_groups(scene: ProcessFiles) -> tuple[Group, ...]:
    """Saves and loads of a small tree, in both forms by each number of processes."""
    return tuple(group for form in FORMS for count in scene.counts for group in _small(scene, form, count))


def _small(scene: ProcessFiles, form: LibraryName, count: int) -> Iterator[Group]:
    """A save with its notes, its end from when the last part is there until everybody has returned, and a load."""
    peers: tuple[LibraryName, ...] = ("Orbax",) if form == "treering" else ()
    saves = (
        scene.save("treering", count, form, "sharded", counter=_touched),
        scene.save(ONE, 1, form, "sharded"),
        *(scene.save(peer, count, peer, "sharded") for peer in peers),
    )
    ends = (scene.save("treering", count, form, "sharded", counter=_after_last_part),)
    loads = (
        scene.load("treering", count, form, "sharded"),
        scene.load(ONE, 1, form, "sharded"),
        *(scene.load(peer, count, peer, "sharded") for peer in peers),
    )
    for what, cases, unit in (
        ("save", saves, "notes put, looked for and removed by one process"),
        ("save, its end", ends, "ms from the last part to the last return"),
        ("load", loads, None),
    ):
        yield Group(
            name=title(form, what, count), cases=cases, between=scene.files.clear, repeats=3, peaks=False, unit=unit
        )


def _touched(turn: Turn) -> float:
    """Notes that the process with the most of them put, looked for and removed."""
    return max(turn.each("notes"), default=float("nan"))


def _after_last_part(turn: Turn) -> float:
    """Milliseconds between the last process' part and the last process' return."""
    return 1000 * (max(turn.each("end")) - max(turn.each("part"))) if turn.done else float("nan")
