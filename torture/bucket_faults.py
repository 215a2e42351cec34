"""Every fault at every request of what is done in a bucket."""

from __future__ import annotations

import collections
import dataclasses
import re
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Final, Self

from torture.bucket_joint import JointPair
from torture.bucket_scenes import SCENES, BucketScene, Ended, Place, WrongArrays, is_told, open_bucket, send_in_parts
from torture.bucket_servers import BucketServer
from torture.fault_proxy import Fault, FaultProxy, Rule, Seen

__all__ = ["Case", "Found", "Striker", "strike_all", "tell"]

DEADLINE: Final = 60.0
"""Seconds after which something hangs."""

_HELD: Final = 4.0
_LARGEST_SMALL: Final = 64
_RANDOM: Final = re.compile(r"(?<=uploadId=)[^&]*|[0-9a-f]{16,}")
_PERSISTENT: Final = 1000
_MOST_LOOKS: Final = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One fault at one request of a scene.

    Attributes:
        scene: the scene's name.
        method: the method of the request.
        target: its path and query, a pattern.
        conditional: whether it has a condition.
        number: which of those that match.
        fault: the fault.
        times: how many of them, from this one on, are struck.
    """

    scene: str
    method: str
    target: str
    conditional: bool
    number: int
    fault: Fault
    times: int = 1

    def __str__(self) -> str:
        what = "if " if self.conditional else ""
        again = "" if self.times == 1 else ", each time"
        return f"{self.scene}: {what}{self.method} {_shown(self.target)} #{self.number}: {self.fault.value}{again}"


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What became of a case.

    Attributes:
        outcome: ``committed``, ``told`` or ``not reached``.
        wrong: what must not be.
        seconds: how long it took.
        error: what was told.
    """

    outcome: str
    wrong: Sequence[str]
    seconds: float
    error: str = ""


class Striker:
    """Scenes over a proxy before one server, a context manager; each bucket is known here by two names.

    Args:
        server: the server.
        seconds: how long a request may take.
        patience: seconds after which nothing is asked again.
    """

    def __init__(self, server: BucketServer, *, seconds: float = 1.0, patience: float = 4.0) -> None:
        send_in_parts()
        self._proxy = FaultProxy(server.port, whole=server.sign_whole)
        self._proxied = server.at(self._proxy.port)
        self._seconds, self._patience = seconds, patience
        self._pair: JointPair | None = None
        name = secrets.token_hex(4)
        self._struck = open_bucket(self._proxied, f"struck-{name}", seconds=seconds, patience=patience)
        self._direct = open_bucket(server, f"direct-{name}", seconds=30.0, patience=60.0)
        # The first save to a bucket asks whether it heeds conditions; a scene of its own asks that again.
        self._scene_run(SCENES[0], self._place(SCENES[0]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pair is not None:
            self._pair.__exit__()
        self._proxy.__exit__()

    def _place(self, scene: BucketScene) -> Place:
        if scene.together and self._pair is None:
            self._pair = JointPair(self._proxied, seconds=self._seconds, patience=self._patience)
            self._pair.save(f"z{secrets.token_hex(6)}z", 1, old=False)  # each asks whether conditions are heeded
        name = f"z{secrets.token_hex(6)}z"
        return Place(self._struck / name, self._direct / name, self._pair if scene.together else None)

    def cases(self, scene: BucketScene) -> list[Case]:
        """Do a scene without a fault, and return a case for each fault at each of its requests."""
        place = self._place(scene)
        scene.prepare(place)
        self._proxy.heal()
        ended, hangs = self._scene_run(scene, place)
        seen = list(self._proxy.seen)
        if hangs or ended.error is not None or (wrong := list(scene.judge(place, ended))):
            raise RuntimeError(f"{scene.name} fails without a fault: {ended.error or wrong}")
        return list(_cases(scene, seen, place.direct.name))

    def strike(self, case: Case) -> Found:
        """Run one case."""
        scene = next(scene for scene in SCENES if scene.name == case.scene)
        place = self._place(scene)
        scene.prepare(place)
        target = case.target.replace("PLACE", place.direct.name)
        self._proxy.heal()
        self._proxy.strike(
            Rule(
                case.fault,
                case.method,
                target,
                case.conditional,
                first=case.number,
                times=case.times,
                seconds=_HELD if case.fault is not Fault.SLOW else 0.5,
            )
        )
        begun = time.monotonic()
        ended, hangs = self._scene_run(scene, place)
        seconds = time.monotonic() - begun
        struck = self._proxy.struck()
        self._proxy.heal()
        wrong = [f"it hangs for more than {DEADLINE:.0f} s"] if hangs else []
        if isinstance(ended.error, WrongArrays):
            wrong.append(f"a wrong array: {ended.error}")
        elif ended.error is not None and not is_told(ended.error):
            wrong.append(f"not told by an error of ours: {type(ended.error).__name__}: {ended.error}")
        if case.fault is Fault.LATE and (judge := scene.follow(place)) is not None:
            self._proxy.deliver_late()
            wrong += judge()
        else:
            self._proxy.deliver_late()
            wrong += scene.judge(place, ended)
        outcome = "committed" if ended.error is None else f"told {type(ended.error).__name__}"
        if scene.together and (errors := [error for error, _ in ended.found or [] if error]):
            outcome = f"{len(errors)} told {errors[0].partition(':')[0]}"
        return Found(outcome if struck else "not reached", wrong, seconds, str(ended.error or ""))

    def _scene_run(self, scene: BucketScene, place: Place) -> tuple[Ended, bool]:
        """Do it on a thread; tell whether it hangs."""
        ended: list[Ended] = []

        def act() -> None:
            try:
                ended.append(Ended(found=scene.act(place)))
            except BaseException as error:  # noqa: BLE001 - the judge is told
                ended.append(Ended(error))

        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        thread.join(DEADLINE)
        return (ended[0] if ended else Ended(TimeoutError("no end"))), thread.is_alive()


def strike_all(
    server: BucketServer, scenes: Sequence[str] | None, faults: Sequence[str] | None, jobs: int, stride: int = 1
) -> list[tuple[Case, Found]]:
    """Run all cases of some scenes and faults, or every so many-th, in so many processes; return what came of them."""
    context = get_context("spawn")
    chosen = [scene.name for scene in SCENES if scenes is None or scene.name in scenes]
    with ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(server,)) as pool:
        cases = [case for some in pool.map(_cases_of, chosen) for case in some]
        todo = [case for case in cases if faults is None or case.fault.name in faults][::stride]
        results: list[tuple[Case, Found]] = []
        for case, found in zip(todo, pool.map(_strike, todo), strict=True):
            results.append((case, found))
            for what in found.wrong:
                print(f"VIOLATION {case}: {what} ({found.outcome}: {found.error})", flush=True)
            if len(results) % 100 == 0:
                print(f"{len(results)} of {len(todo)} cases", flush=True)
    return results


def tell(results: Sequence[tuple[Case, Found]]) -> int:
    """Print what became of the cases, scene by scene; return how many violations there were."""
    table: dict[str, collections.Counter[str]] = {}
    requests: dict[str, set[tuple[str, str, int]]] = {}
    for case, found in results:
        table.setdefault(case.scene, collections.Counter())[found.outcome] += 1
        requests.setdefault(case.scene, set()).add((case.method, case.target, case.number))
    for scene, outcomes in table.items():
        counted = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
        print(f"{scene}: {len(requests[scene])} requests, {outcomes.total()} cases: {counted}")
    violations = sum(bool(found.wrong) for _, found in results)
    slowest = max((found.seconds for _, found in results), default=0.0)
    print(f"{len(results)} cases, {violations} with violations; the slowest took {slowest:.1f} s")
    return violations


def _cases(scene: BucketScene, seen: Sequence[Seen], name: str) -> Iterator[Case]:
    counts: collections.Counter[tuple[str, str, bool]] = collections.Counter()
    for one in seen:
        target = pattern_of(one.target, name)
        counts[one.method, target, one.conditional] += 1
        number = counts[one.method, target, one.conditional]
        if scene.together and one.method == "GET" and number > _MOST_LOOKS:
            continue  # how often processes look for each other's messages is up to their timing
        for fault in Fault:
            small = one.size < _LARGEST_SMALL
            if fault.applies(one.method, small=small) and (fault is not Fault.NO_RANGE or one.ranged):
                yield Case(scene.name, one.method, target, one.conditional, number, fault)
        if one.conditional:
            for fault in (Fault.DROP_ANSWER, Fault.UNAVAILABLE, Fault.CONFLICT):
                yield Case(scene.name, one.method, target, one.conditional, number, fault, _PERSISTENT)


def pattern_of(target: str, name: str) -> str:
    """Return the pattern of a target: what is random in it matches anything."""
    parts = _RANDOM.split(target.replace(name, "\0"))
    return "^" + "[^/&]*".join(map(re.escape, parts)).replace("\0", "PLACE") + "$"


def _shown(target: str) -> str:
    return target.replace("[^/&]*", "*").replace("\\", "").strip("^$")


_STRIKERS: Final[list[Striker]] = []


def _begin(server: BucketServer) -> None:
    _STRIKERS.append(Striker(server))


def _cases_of(name: str) -> list[Case]:
    return _STRIKERS[0].cases(next(scene for scene in SCENES if scene.name == name))


def _strike(case: Case) -> Found:
    try:
        return _STRIKERS[0].strike(case)
    except Exception as error:  # noqa: BLE001 - a case that breaks must not end the others
        return Found("broken", [f"the case broke: {type(error).__name__}: {error}"], 0.0)
