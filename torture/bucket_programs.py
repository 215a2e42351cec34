"""What runs against a simulated bucket: savers, removers, collectors, readers, copiers, each a generator of requests.

They do what the recipes above the store do, in the same order, with the real functions of
`treering._store.objects.protocol` or, to show that the judge sees it, with broken ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from torture.simulated_bucket import Actor, Bucket, Save
from torture.simulated_folder import Violation
from treering._codec import key_document
from treering._codec.key_document import (
    INDEX_FORM,
    Superseded,
    attempts_in,
    encode_tombstone,
    encode_waiting,
    fenced,
    is_tombstone,
    placeholder,
    superseded_by,
    superseded_in,
)
from treering._store.api import Held, Outcome
from treering._store.objects import protocol as real
from treering._store.objects.protocol import Content, Expired
from treering._store.objects.requests import Delete, List, Listed, Put, Status, Steps, Wait
from treering._values.checkpoint_names import INDEX, attempt_of_journal, is_data, journal_of
from treering.errors import CorruptError, FormatError, UnsupportedError

__all__ = [
    "DAY",
    "SOUND",
    "BucketProtocol",
    "World",
    "collect",
    "copy",
    "fence",
    "live",
    "load",
    "remove",
    "save",
    "save_and_sweep",
    "swap",
]

DAY = 86400.0
_NEWER = dataclasses.replace(INDEX_FORM, version=9)
_UNREADABLE = (CorruptError, FormatError, UnsupportedError)

# The same documents are read a dozen times over, by programs of which each would read them once.
key_document._read_members = functools.lru_cache(maxsize=64)(key_document._read_members)

Sweep: TypeAlias = Callable[[str, str, str, Sequence[str], Expired], Steps[Held]]


class Listing(NamedTuple):
    """What is at a place, by name without the place."""

    data: dict[str, Listed]
    markers: dict[str, Listed]
    others: tuple[str, ...]

    def data_of(self, attempt: str) -> list[str]:
        return [name for name in self.data if name[5:21] == attempt]


@dataclasses.dataclass(slots=True)
class World:
    """What a program knows beside the answers."""

    bucket: Bucket
    now: Callable[[], float]
    grace: float
    patience: float
    """How long it asks again."""

    def deadline(self) -> Expired:
        """Return what tells when to stop asking again."""
        end = self.now() + self.patience
        return lambda: self.now() >= end


def look(place: str, *, markers_first: bool = False) -> Steps[Listing]:
    """List a place: a bucket does that in pages, in between which others go on."""
    prefixes = [f"{place}data-", f"{place}.treering.json."]
    found: dict[str, Listed] = {}
    for prefix in reversed(prefixes) if markers_first else prefixes:
        answer = yield List(prefix)
        if answer.status is not Status.DONE:
            raise OSError(errno.EIO, "no answer")
        found.update((one.name.removeprefix(place), one) for one in answer.listed)
    data = {name: one for name, one in found.items() if is_data(name)}
    markers = {name: one for name, one in found.items() if attempt_of_journal(name)}
    return Listing(data, markers, tuple(found.keys() - data.keys() - markers.keys()))


def fence(key: str, expired: Expired) -> Steps[Any]:
    """Change the key, and nothing that it says, as `treering._store.waiting.sweep_old` does through a store.

    Returns:
        The new version; None where that did not succeed: then nothing may be swept by age.
    """
    found = yield from real.read(key, expired)
    try:
        data = placeholder() if found is None else fenced(found.data)
    except _UNREADABLE:
        return None
    outcome = yield from real.swap(key, data, None if found is None else found.version, expired)
    now = yield from real.read(key, expired)
    return now.version if outcome is Outcome.DONE and now is not None and now.data == data else None


class BucketProtocol(NamedTuple):
    """What the programs do."""

    find_base: Callable[..., Steps[Content]] = real.find_base
    make_marker: Callable[..., Steps[bool]] = real.make_marker
    commit: Callable[[str, bytes, Any, str, Expired], Steps[Outcome]] = real.commit
    read_back: Callable[[str, Any, str, Expired], Steps[Outcome]] = real.read_back
    sweep: Sweep = real.sweep
    sweep_aged: Sweep = real.sweep
    """By which what is older than a day is swept, after the fence."""
    fence: Callable[[str, Expired], Steps[Any]] = fence
    delete: Callable[[str, Any, Expired], Steps[Outcome]] = real.delete
    delete_tombstone: Callable[[str, Any, float, Expired], Steps[Outcome]] = real.delete_tombstone
    swap: Callable[[str, bytes, Any, Expired], Steps[Outcome]] = real.swap
    look_first: Callable[[str], Steps[Sweep | None]] | None = None
    """What a collector does before it lists, and how it sweeps then; None for nothing."""
    rebases: bool = False
    """Whether a refused commit is tried again on what is there now."""
    grace: bool = True
    """Whether data wait for readers."""
    lists_all: bool = True
    """Whether an index lists all that waits, also what was not there at a listing that is older."""


SOUND = BucketProtocol()


# ---------------------------------------------------------------------------------------------------------------- save


def save(world: World, attempt: Save, protocol: BucketProtocol, *, probe: bool = False) -> Steps[str]:
    """Save, and return how that ended."""
    for _ in range(3):
        try:
            return (yield from _save_once(world, attempt, protocol, probe=probe))
        except FileNotFoundError:  # swept before it had any data: begin again
            continue
    return "failed"


def _save_once(world: World, attempt: Save, protocol: BucketProtocol, *, probe: bool) -> Steps[str]:
    place = attempt.place
    key, marker = place + INDEX, place + journal_of(attempt.attempt)
    there = yield from look(place)
    base = yield from real.read(key, world.deadline())
    if base is None:
        base = yield from protocol.find_base(key, world.deadline(), absent=True)
    current = world.bucket.places[place].current
    attempt.seen = None if current is None or is_tombstone(base.data) else current.attempt
    if not attempt.overwrite and not is_tombstone(base.data):
        return "exists"
    try:
        yield from protocol.make_marker(key, marker, base.version, world.deadline(), probe=probe)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            raise Violation("a sound endpoint is accused") from error
        raise
    yield from _sweep_all(world, place, there, protocol.sweep)
    for name, content in attempt.files.items():
        answer = yield Put(name, content)
        if answer.status is not Status.DONE:
            yield from _withdraw(attempt, marker)
            return "failed"
    waiting = _still_there(world, base, there, protocol)
    outcome = yield from _commit(world, attempt, protocol, base, encode_index(attempt, waiting))
    if outcome is Outcome.LOST:
        yield from _withdraw(attempt, marker)
        return "lost"
    if outcome is Outcome.UNKNOWN:
        return "unknown"
    with contextlib.suppress(OSError):  # it is saved: the next one tries again
        yield Delete((marker,))
        yield from _remove_due(world, place, waiting, world.now(), protocol)
    return "done"


def _commit(world: World, attempt: Save, protocol: BucketProtocol, base: Content, index: bytes) -> Steps[Outcome]:
    key = attempt.place + INDEX
    try:
        outcome = yield from protocol.commit(key, index, base.version, attempt.attempt, world.deadline())
        if outcome is Outcome.LOST and protocol.rebases:
            found = yield from real.read(key, world.deadline())
            if found is not None:
                current = world.bucket.places[attempt.place].current
                attempt.seen = None if current is None else current.attempt
                commit = protocol.commit(key, index, found.version, attempt.attempt, world.deadline())
                outcome = yield from commit
    except KeyboardInterrupt:
        try:
            outcome = yield from protocol.read_back(key, base.version, attempt.attempt, world.deadline())
        except OSError:
            outcome = Outcome.UNKNOWN
    if outcome is Outcome.DONE and not attempt.committed:
        raise Violation(f"{attempt.attempt} is acknowledged and was never committed")
    return outcome


def encode_index(attempt: Save, waiting: Iterable[Superseded]) -> bytes:
    """Return the index of an attempt."""
    waiting = list(waiting)
    form = _NEWER if attempt.newer else INDEX_FORM
    return form.encode(
        [
            ("attempt", attempt.attempt),
            ("files", [{"name": name.removeprefix(attempt.place)} for name in attempt.files]),
            ("replaces", [name for one in waiting for name in one.files]),
            ("superseded", encode_waiting(waiting)),
            ("metadata", {}),
        ]
    )


def _still_there(world: World, base: Content, there: Listing, protocol: BucketProtocol) -> list[Superseded]:
    """Return what waits when the base is replaced; of what is past the grace only what was listed before that."""
    try:
        waiting = superseded_by(base.data, base.modified)
    except _UNREADABLE:
        return []
    grace = world.grace if protocol.lists_all else -math.inf
    present = [
        one
        if one.since is None or one.since + grace > world.now()
        else dataclasses.replace(one, files=[name for name in one.files if name in there.data])
        for one in waiting
    ]
    return [one for one in present if one.files]


def _withdraw(attempt: Save, marker: str) -> Steps[None]:
    answer = yield Delete(tuple(attempt.files))
    if answer.status is Status.DONE:
        yield Delete((marker,))


def _remove_due(
    world: World, place: str, waiting: Iterable[Superseded], since: float, protocol: BucketProtocol
) -> Steps[bool]:
    """Remove the data whose grace is over; tell whether nothing waits any more."""
    grace, all_gone = world.grace if protocol.grace else 0.0, True
    for one in waiting:
        began = since if one.since is None else one.since
        if began + grace > world.now():
            all_gone = False
        elif one.files:
            answer = yield Delete(tuple(place + name for name in one.files))
            all_gone = all_gone and answer.status is Status.DONE
    return all_gone


# ------------------------------------------------------------------------------------------------- remove and collect


def remove(world: World, actor: Actor, place: str, protocol: BucketProtocol) -> Steps[str]:
    """Remove the checkpoint that is there."""
    key = place + INDEX
    found = yield from real.read(key, world.deadline())
    if found is None or is_tombstone(found.data):
        return "nothing to remove"
    if not real._attempts(found):
        return "unreadable"
    current = world.bucket.places[place].current
    actor.removing = None if current is None else current.attempt
    outcome = yield from protocol.delete(key, found.version, world.deadline())
    if outcome is Outcome.DONE and current is not None and current.ended is None:
        raise Violation(f"{current.attempt} is said to be removed and is there")
    if outcome is Outcome.DONE:
        with contextlib.suppress(OSError):
            yield from _drain(world, place, protocol)
    return {Outcome.DONE: "removed", Outcome.LOST: "not removed", Outcome.UNKNOWN: "perhaps removed"}[outcome]


def _drain(world: World, place: str, protocol: BucketProtocol) -> Steps[None]:
    """Remove what the key lists and no reader may want any more; shorten a tombstone that has become empty."""
    key = place + INDEX
    found = yield from real.read(key, world.deadline())
    if found is None:
        return
    try:
        waiting = superseded_in(found.data)
    except _UNREADABLE:
        return
    gone = yield from _remove_due(world, place, waiting, found.modified, protocol)
    if gone and is_tombstone(found.data) and any(one.files for one in waiting):
        small = encode_tombstone([dataclasses.replace(one, files=()) for one in waiting[:1]])
        yield from protocol.swap(key, small, found.version, world.deadline())


def collect(
    world: World, place: str, protocol: BucketProtocol, *, by_age: bool, markers_first: bool = False
) -> Steps[str]:
    """Remove what nobody can want: of dead attempts by their base; by age after a fence; what has waited."""
    key = place + INDEX
    sweep: Sweep | None = None
    if protocol.look_first is not None:
        sweep = yield from protocol.look_first(key)
    there = yield from look(place, markers_first=markers_first)
    doubtful = yield from _sweep_all(world, place, there, sweep or protocol.sweep)
    if by_age:
        there = yield from look(place, markers_first=markers_first)
        if (yield from _sweep_aged(world, place, there, doubtful, protocol)):
            yield from _drain(world, place, protocol)
            return "collected by age"
    yield from _drain(world, place, protocol)
    found = yield from real.read(key, world.deadline())
    if found is not None and is_tombstone(found.data):
        there = yield from look(place)
        if not (there.data or there.markers or there.others):
            yield from protocol.delete_tombstone(key, found.version, world.now(), world.deadline())
    return "collected"


def _find_orphans(world: World, there: Listing, found: Content | None) -> list[str]:
    """Return the data older than a day that no marker and no document names; a remembered attempt names none."""
    try:
        named = set() if found is None else {name for one in superseded_by(found.data, 0.0) for name in one.files}
    except _UNREADABLE:
        return []
    marked = {attempt_of_journal(name) for name in there.markers}
    old = [name for name, one in there.data.items() if world.now() - one.modified > DAY]
    return [name for name in old if name not in named and name[5:21] not in marked]


def _sweep_all(world: World, place: str, there: Listing, sweep: Sweep) -> Steps[list[str]]:
    """Sweep every marker that was listed; return those that could not be judged."""
    doubtful: list[str] = []
    for marker in there.markers:
        attempt = attempt_of_journal(marker) or ""
        data = [place + name for name in there.data_of(attempt)]
        if (yield from sweep(place + INDEX, place + marker, attempt, data, world.deadline())) is Held.UNKNOWN:
            doubtful.append(marker)
    return doubtful


def _sweep_aged(world: World, place: str, there: Listing, doubtful: list[str], protocol: BucketProtocol) -> Steps[bool]:
    """Sweep what is older than a day, after a fence; tell whether there was such a thing."""
    key = place + INDEX
    markers = {
        name: one for name, one in there.markers.items() if name in doubtful and world.now() - one.modified > DAY
    }
    orphans = _find_orphans(world, there, (yield from real.read(key, world.deadline())))
    if not markers and not orphans:
        return False
    if (yield from protocol.fence(key, world.deadline())) is None:
        return True
    yield from _sweep_all(world, place, there._replace(markers=markers), protocol.sweep_aged)
    # One of them may have committed just before the fence.
    found = yield from real.read(key, world.deadline())
    for name in set(orphans).intersection(_find_orphans(world, there, found)):
        yield Delete((place + name,))
    return True


# --------------------------------------------------------------------------------------------------- load, copy, swap


def load(world: World, place: str) -> Steps[bytes | str]:
    """Load, and return the tree or how it ended."""
    key = place + INDEX
    broken: str | None = None
    for _ in range(4):
        began = world.now()
        found = yield from real.read(key, world.deadline())
        if found is None or is_tombstone(found.data):
            return "not found"
        try:
            attempt = world.bucket.saves[attempts_in(found.data)[0]]
        except _UNREADABLE:
            return "unreadable"
        if attempt.attempt == broken:
            raise Violation(f"{broken} is there and its data are not")
        pieces = yield from _load_pieces(world, attempt)
        if pieces is not None:
            if len(set(pieces)) != 1:
                raise Violation(f"{attempt.attempt} is read as a mixture of {set(pieces)}")
            return pieces[0]
        # Once a newer version's index was replaced by one that cannot read it, the key no longer says that these wait.
        if attempt.listed and world.now() < began + world.grace:
            raise Violation(f"data of {attempt.attempt} are gone before the grace of a reader is over")
        broken = attempt.attempt
    return "busy"


def _load_pieces(world: World, attempt: Save) -> Steps[list[bytes] | None]:
    pieces: list[bytes] = []
    for name in attempt.files:
        found = yield from real.read(name, world.deadline())
        if found is None:
            return None
        pieces.append(found.data)
    return pieces


def copy(world: World, source: str, attempt: Save, protocol: BucketProtocol) -> Steps[str]:
    """Copy a checkpoint to another place: a new attempt, with names of its own."""
    tree = yield from load(world, source)
    if isinstance(tree, str):
        return f"copy: {tree}"
    attempt.files = dict.fromkeys(attempt.files, tree)
    return (yield from save(world, attempt, protocol))


def live(world: World, actor: Actor, attempt: Save, protocol: BucketProtocol) -> Steps[str]:
    """Save, remove what was saved, and collect it."""
    result = yield from save(world, attempt, protocol)
    if result != "done":
        return result
    with contextlib.suppress(OSError):
        yield Wait(10.0)
        yield from remove(world, actor, attempt.place, protocol)
        for _ in range(2):
            yield Wait(2 * world.grace + 1.0)
            yield from collect(world, attempt.place, protocol, by_age=True)
    return "done"


def save_and_sweep(world: World, attempt: Save, protocol: BucketProtocol) -> Steps[str]:
    """Save as a process does first in a run: when it is done, sweep all places, by age too."""
    result = yield from save(world, attempt, protocol)
    if result == "done":
        with contextlib.suppress(OSError):
            for place in world.bucket.places:
                yield from collect(world, place, protocol, by_age=True)
    return result


def swap(world: World, actor: Actor, name: str, nonce: int, protocol: BucketProtocol) -> Steps[str]:
    """Add one to the number in a small document."""
    found = yield from real.read(name, world.deadline())
    number = 0 if found is None else int(found.data.split()[0])
    before = actor.swaps
    data = b"%d %d" % (number + 1, nonce)
    outcome = yield from protocol.swap(name, data, None if found is None else found.version, world.deadline())
    made = actor.swaps > before
    if (outcome is Outcome.DONE and not made) or (outcome is Outcome.LOST and made):
        raise Violation(f"a swap is said to be {outcome} and was {'' if made else 'not '}made")
    return f"swap {outcome.value}"
