"""Protocols for buckets that are broken on purpose: proof that the simulated schedules find what is wrong with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

from torture.bucket_programs import SOUND, Sweep, fence
from torture.file_simulation import FileProtocol
from treering._codec.key_document import attempts_in, is_tombstone, placeholder, superseded_in, tombstone_of
from treering._store.api import Held, Outcome
from treering._store.objects import protocol as real
from treering._store.objects.protocol import Content, Expired, put_file, read_marker
from treering._store.objects.requests import Absent, Delete, Get, ObjectVersion, Put, Status, Steps
from treering._values.checkpoint_names import INDEX

__all__ = ["BROKEN_BUCKETS", "BROKEN_FILES"]

_NOTHING: Final = ObjectVersion("nothing")
_EMPTY: Final = placeholder()


# ------------------------------------------------------------------------------------------------------------- commit


def take_absence_as_base(key: str, expired: Expired, **_: bool) -> Steps[Content]:
    found = yield from real.read(key, expired)
    return Content(_EMPTY, _NOTHING, 0.0) if found is None else found


def commit_by_create(key: str, index: bytes, base: Any, attempt: str, expired: Expired) -> Steps[Outcome]:
    condition = Absent.ABSENT if base == _NOTHING else base
    return (yield from real._swap(key, index, condition, lambda found: real._has_committed(found, attempt), expired))


def commit_without_condition(key: str, index: bytes, base: Any, _: str, expired: Expired) -> Steps[Outcome]:
    found = yield from real.read(key, expired)
    if found is None or found.version != base:
        return Outcome.LOST
    answer = yield Put(key, index)
    return Outcome.DONE if answer.status is Status.DONE else Outcome.UNKNOWN


def commit_and_compare(compare: Callable[[Content, bytes, str], Outcome | None]) -> Callable[..., Steps[Outcome]]:
    def commit(key: str, index: bytes, base: Any, attempt: str, expired: Expired) -> Steps[Outcome]:
        return (yield from real._swap(key, index, base, lambda found: compare(found, index, attempt), expired))

    return commit


def compare_bytes(found: Content, index: bytes, _: str) -> Outcome:
    return Outcome.DONE if found.data == index else Outcome.LOST


def compare_own_attempt(found: Content, _: bytes, attempt: str) -> Outcome:
    return Outcome.DONE if attempt in real._attempts(found)[:1] else Outcome.LOST


def commit_once(key: str, index: bytes, base: Any, attempt: str, expired: Expired) -> Steps[Outcome]:
    answer = yield Put(key, index, base)
    if answer.status is Status.DONE:
        return Outcome.DONE
    outcome = yield from real.read_back(key, base, attempt, expired)
    return Outcome.DONE if outcome is Outcome.DONE else Outcome.LOST


def take_unknown_for_lost(key: str, index: bytes, base: Any, attempt: str, expired: Expired) -> Steps[Outcome]:
    outcome = yield from real.commit(key, index, base, attempt, expired)
    return Outcome.LOST if outcome is Outcome.UNKNOWN else outcome


def read_back_lost(key: str, base: Any, attempt: str, expired: Expired) -> Steps[Outcome]:
    outcome = yield from real.read_back(key, base, attempt, expired)
    return Outcome.LOST if outcome is Outcome.UNKNOWN else outcome


# -------------------------------------------------------------------------------------------------------------- sweep


def sweep_without_base(key: str, marker: str, attempt: str, data: Sequence[str], expired: Expired) -> Steps[Held]:
    found = yield from real.read(key, expired)
    named = ("",) if found is None else real._attempts(found)
    if not named:
        return Held.UNKNOWN
    yield Delete((marker,) if attempt in named else (*data, marker))
    return Held.NO


def sweep_all_but_own(key: str, marker: str, attempt: str, data: Sequence[str], expired: Expired) -> Steps[Held]:
    begun = yield from real.read(marker, expired)
    found = yield from real.read(key, expired)
    base = None if begun is None else read_marker(begun.data)
    own = () if found is None else real._attempts(found)[:1]
    if base is None or found is None or base == found.version or not own or attempt in own:
        return Held.UNKNOWN
    yield Delete((*data, marker))
    return Held.NO


def sweep_against(found: Content | None) -> Sweep:
    def sweep(_: str, marker: str, attempt: str, data: Sequence[str], expired: Expired) -> Steps[Held]:
        begun = yield from real.read(marker, expired)
        base = None if begun is None else read_marker(begun.data)
        named = () if found is None else real._attempts(found)
        if base is None or found is None or base == found.version or not named or attempt in named:
            return Held.UNKNOWN
        yield Delete((*data, marker))
        return Held.NO

    return sweep


def read_key_first(key: str) -> Steps[Sweep]:
    found = yield from real.read(key, lambda: True)
    return sweep_against(found)


def pretend_to_fence(key: str, expired: Expired) -> Steps[Any]:
    found = yield from real.read(key, expired)
    return _NOTHING if found is None else found.version


def fence_anything(key: str, expired: Expired) -> Steps[Any]:
    found = yield from real.read(key, expired)
    if found is None or real._attempts(found):
        return (yield from fence(key, expired))
    answer = yield Put(key, found.data + b" ", found.version)
    return answer.found and answer.found.version


# ------------------------------------------------------------------------------------------------------------ removal


def delete_blindly(key: str, expected: Any, now: float, expired: Expired) -> Steps[Outcome]:
    found = yield from real.read(key, expired)
    if found is None or found.version != expected or now - found.modified < real.LONGEST_DELAY:
        return Outcome.LOST
    if superseded_in(found.data) and any(one.files for one in superseded_in(found.data)):
        return Outcome.LOST
    yield Delete((key,))
    return Outcome.DONE


def delete_at_once(key: str, expected: Any, _: float, expired: Expired) -> Steps[Outcome]:
    return (yield from real.delete_tombstone(key, expected, float("inf"), expired))


def delete_without_condition(key: str, expected: Any, expired: Expired) -> Steps[Outcome]:
    found = yield from real.read(key, expired)
    if found is None or found.version != expected:
        return Outcome.LOST
    yield Put(key, tombstone_of(found.data, found.modified))
    return Outcome.DONE


# ------------------------------------------------------------------------------------------------------------ versions


def put_the_same_placeholder(key: str, expired: Expired, **_: bool) -> Steps[Content]:
    while True:
        if (found := (yield from real.read(key, expired))) is not None:
            return found
        yield Put(key, _EMPTY, Absent.ABSENT)


def swap_for_the_same(name: str, data: bytes, expected: Any, expired: Expired) -> Steps[Outcome]:
    small = name.endswith(INDEX) and is_tombstone(data) and attempts_in(data)[0] == ""
    return (yield from real.swap(name, _EMPTY if small else data, expected, expired))


BROKEN_BUCKETS: Final = {
    "commit by create": SOUND._replace(
        find_base=take_absence_as_base, commit=commit_by_create, delete_tombstone=delete_at_once
    ),
    "unconditional commit": SOUND._replace(commit=commit_without_condition),
    "rebasing after a refusal": SOUND._replace(rebases=True),
    "read-back by bytes": SOUND._replace(commit=commit_and_compare(compare_bytes)),
    "read-back of the own attempt alone": SOUND._replace(commit=commit_and_compare(compare_own_attempt)),
    "the base is there, so it is lost": SOUND._replace(commit=commit_once),
    "what is unknown is lost": SOUND._replace(commit=take_unknown_for_lost),
    "what was interrupted is lost": SOUND._replace(read_back=read_back_lost),
    "sweep by age without fence": SOUND._replace(fence=pretend_to_fence, sweep_aged=sweep_without_base),
    "markers listed after the index is read": SOUND._replace(look_first=read_key_first),
    "sweep of what is superseded": SOUND._replace(sweep=sweep_all_but_own),
    "fence of what cannot be read": SOUND._replace(fence=fence_anything),
    "blind delete of a tombstone": SOUND._replace(delete_tombstone=delete_blindly),
    "delete of a young tombstone": SOUND._replace(delete_tombstone=delete_at_once),
    "unconditional removal": SOUND._replace(delete=delete_without_condition),
    "versions that recur": SOUND._replace(find_base=put_the_same_placeholder, swap=swap_for_the_same),
    "no grace": SOUND._replace(grace=False),
    "list of what waits by an older listing": SOUND._replace(lists_all=False),
}
"""What is wrong, and the protocol that does it."""


# -------------------------------------------------------------------------------------------------------- single files


def put_without_condition(name: str, data: bytes, expired: Expired, *, new: bool = False) -> Steps[Outcome]:
    if new:
        return (yield from put_file(name, data, expired, new=True))
    while True:
        answer = yield Put(name, data)
        if answer.status is not Status.NO_ANSWER:
            return Outcome.DONE
        if expired():
            return Outcome.UNKNOWN


def put_again(name: str, data: bytes, expired: Expired, *, new: bool = False) -> Steps[Outcome]:
    """Put the same bytes once more over what another save may have put in their place."""
    outcome = yield from put_file(name, data, expired, new=new)
    while not new and outcome is Outcome.UNKNOWN and not expired():
        outcome = yield from put_unknown(name, data, expired)
    return outcome


def put_unknown(name: str, data: bytes, expired: Expired) -> Steps[Outcome]:
    outcome = yield from put_file(name, data, expired)
    return Outcome.UNKNOWN if outcome is Outcome.LOST else outcome


def put_and_compare_sizes(name: str, data: bytes, expired: Expired, *, new: bool = False) -> Steps[Outcome]:
    steps = put_file(name, data, expired, new=new)
    request = next(steps)
    try:
        while True:
            answer = yield request
            if isinstance(request, Get) and answer.found is not None and answer.found.size == len(data):
                answer = dataclasses.replace(answer, data=data)
            request = steps.send(answer)
    except StopIteration as stop:
        found: Outcome = stop.value
        return found


def put_unknown_as_lost(name: str, data: bytes, expired: Expired, *, new: bool = False) -> Steps[Outcome]:
    outcome = yield from put_file(name, data, expired, new=new)
    return Outcome.LOST if outcome is Outcome.UNKNOWN else outcome


BROKEN_FILES: Final = {
    "the same bytes again": FileProtocol(nonce=False),
    "no condition": FileProtocol(put=put_without_condition),
    "what is unknown is put again": FileProtocol(put=put_again),
    "read-back by size": FileProtocol(put=put_and_compare_sizes),
    "what is unknown is lost": FileProtocol(put=put_unknown_as_lost),
}
"""The same of single files."""
