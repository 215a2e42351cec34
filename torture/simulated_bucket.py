"""A bucket in memory, and a judge that sees every change of it: what may happen to a checkpoint, and what may not."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from torture.simulated_folder import Violation
from treering._codec.key_document import SMALL_TOMBSTONE, is_tombstone
from treering._store.objects.requests import (
    Absent,
    Answer,
    Copy,
    Delete,
    Get,
    Head,
    List,
    Listed,
    ObjectVersion,
    Put,
    Range,
    Request,
    Status,
)
from treering._values.checkpoint_names import INDEX

__all__ = ["Actor", "Bucket", "Place", "Save", "Stored"]

_ATTEMPT = re.compile(rb'"attempt": "([0-9a-f]{16})"')
_DATA = re.compile(r"data-([0-9a-f]{16})-")
MISSING = Answer(Status.MISSING)
REFUSED = Answer(Status.REFUSED)
DONE = Answer(Status.DONE)


@dataclasses.dataclass(slots=True)
class Save:
    """What is known of one attempt."""

    attempt: str
    place: str
    overwrite: bool
    files: dict[str, bytes]
    newer: bool = False
    """Whether a newer version writes it, whose index nobody else here can read."""
    seen: str | None = None
    """The attempt that stood at the key when it looked there; None for no checkpoint."""
    committed: bool = False
    ended: float | None = None
    """When another attempt, or a tombstone, took its place."""
    listed: bool = True
    """Whether the key can say that its data wait: not once an index was replaced that nobody here could read."""


@dataclasses.dataclass(slots=True, eq=False)
class Actor:
    """What the judge has to know of the program that made a request."""

    save: Save | None = None
    removing: str | None = None
    """The attempt that it removes just now."""
    removed: bool = False
    """Whether its tombstone was put."""
    refused: bool = False
    """Whether its save was said not to be committed."""
    swaps: int = 0
    """How many of its swaps of the small document were made."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """The content of an object."""

    data: bytes
    version: ObjectVersion
    modified: float


@dataclasses.dataclass(slots=True)
class Place:
    """What stands at one key, as the judge sees it."""

    current: Save | None = None
    """The checkpoint that is there."""
    damaged: bool = False


class Bucket:
    """Objects by name; strong reads, and versions of one of the three kinds that there are.

    Args:
        kind: ``content`` for versions that say no more than the content does, as on S3; ``generation`` as on GCS;
            ``serial`` as on Azure.
        grace: how long data that were the checkpoint have to stay.
        now: tells the time.
    """

    def __init__(self, kind: str, grace: float, now: Callable[[], float]) -> None:
        self.objects: dict[str, Stored] = {}
        self.places = {"a/": Place(), "b/": Place()}
        self.saves: dict[str, Save] = {}
        self._kind = kind
        self._grace = grace
        self._now = now
        self._serial = 0

    def perform(self, request: Request, actor: Actor) -> Answer:
        """Do what a request asks for, now.

        Raises:
            Violation: it must not be done.
        """
        match request:
            case Get(name):
                found = self.objects.get(name)
                return MISSING if found is None else Answer(Status.DONE, data=found.data, found=_listed(name, found))
            case Put():
                return self._put(request, actor)
            case Delete():
                return self._delete(request)
            case List(prefix):
                listed = tuple(_listed(name, found) for name, found in self.objects.items() if name.startswith(prefix))
                return Answer(Status.DONE, listed=listed)
            case Head(name):
                found = self.objects.get(name)
                return MISSING if found is None else Answer(Status.DONE, found=_listed(name, found))
            case Range() | Copy():
                raise Violation("the programs read whole objects")

    def _put(self, put: Put, actor: Actor) -> Answer:
        old = self.objects.get(put.name)
        if put.condition is Absent.ABSENT:
            if old is not None:
                return REFUSED
        elif put.condition is not None and (old is None or old.version != put.condition):
            return REFUSED
        if put.name.endswith("/" + INDEX):
            self._judge_key(put.name.removesuffix(INDEX), put.data, actor)
        elif put.name.endswith("left"):
            actor.swaps += 1
        new = self._stored(put.data)
        self.objects[put.name] = new
        return Answer(Status.DONE, found=_listed(put.name, new))

    def _stored(self, data: bytes) -> Stored:
        self._serial += 1
        if self._kind == "content":
            version = ObjectVersion(f'"{hash(data) & 0xFFFFFFFFFFFFFFFF:016x}"')
        elif self._kind == "generation":
            version = ObjectVersion('"e"', str(self._serial))
        else:
            version = ObjectVersion(f'"{self._serial}"')
        return Stored(data, version, self._now())

    def _delete(self, delete: Delete) -> Answer:
        if delete.condition is not None:
            old = self.objects.get(delete.names[0])
            if old is None:
                return MISSING
            if old.version != delete.condition:
                return REFUSED
        for name in delete.names:
            if name in self.objects:
                self._judge_delete(name)
                del self.objects[name]
        return DONE

    def damage(self, place: str) -> None:
        """Flip a bit of what stands at a key."""
        key = place + INDEX
        if (old := self.objects.get(key)) is not None and self.places[place].current is not None:
            data = bytearray(old.data)
            data[-3] ^= 1
            self.objects[key] = self._stored(bytes(data))
            self.places[place].damaged = True

    # ------------------------------------------------------------------------------------------------------- the judge

    def _judge_key(self, place: str, data: bytes, actor: Actor) -> None:
        at = self.places[place]
        before = at.current
        if is_tombstone(data):
            if before is not None:
                if actor.removing != before.attempt:
                    raise Violation(f"{before.attempt} is replaced by a tombstone that was not meant for it")
                actor.removed = True
                before.ended = self._now()
                at.current, at.damaged = None, False
            return
        found = _ATTEMPT.search(data)
        if found is None:
            raise Violation("the key becomes something that is no document")
        save = self.saves[found[1].decode()]
        if save is before:
            if at.damaged or save.newer:
                raise Violation(f"{save.attempt} is fenced though it is damaged or newer")
            return
        self._judge_commit(save, before, actor)
        if before is not None:
            before.ended = self._now()
            if at.damaged or before.newer:
                for one in self.saves.values():
                    one.listed = False
        at.current, at.damaged = save, False

    def _judge_commit(self, save: Save, before: Save | None, actor: Actor) -> None:
        if save.committed:
            raise Violation(f"{save.attempt}, which was replaced or removed, comes back")
        if actor.save is not save:
            raise Violation(f"{save.attempt} is committed by another program")
        if before is not None and not save.overwrite:
            raise Violation(f"{save.attempt} replaces {before.attempt} and was not to overwrite anything")
        if (None if before is None else before.attempt) != save.seen:
            raise Violation(f"{save.attempt} replaces {before and before.attempt}, which it has not seen")
        for name, content in save.files.items():
            there = self.objects.get(name)
            if there is None or there.data != content:
                raise Violation(f"{save.attempt} is committed without its data")
        save.committed = True

    def _judge_delete(self, name: str) -> None:
        place, _, rest = name.partition("/")
        if rest == INDEX:
            current = self.places[f"{place}/"].current
            if current is not None:
                raise Violation(f"the index of {current.attempt} is deleted")
            return
        found = _DATA.match(rest)
        if found is None:
            return
        save = self.saves[found[1]]
        if save.committed and save.ended is None:
            raise Violation(f"data of {save.attempt} are removed while it is the checkpoint")
        waits = save.committed and save.listed and save.ended is not None
        if waits and self._now() < (save.ended or 0.0) + self._grace:
            raise Violation(f"data of {save.attempt} are removed before its grace is over")

    def judge_rest(self, place: str) -> None:
        """Judge what is there when all is over, every collector has done its work, and nothing waits any more.

        Raises:
            Violation: something is left over.
        """
        at = self.places[place]
        key = place + INDEX
        wanted = set() if at.current is None else {key, *at.current.files}
        there = {name for name in self.objects if name.startswith(place)} - {place + "left"}
        if at.current is None and key in there and len(self.objects[key].data) == SMALL_TOMBSTONE:
            there.remove(key)
        if there != wanted:
            raise Violation(f"{sorted(there - wanted)} is left over, {sorted(wanted - there)} is missing")


def _listed(name: str, found: Stored) -> Listed:
    return Listed(name, len(found.data), found.modified, found.version)
