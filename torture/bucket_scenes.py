"""What is done in a bucket while requests are struck, and how a fresh connection judges what it left."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

import treering
from torture.bucket_joint import JointPair, fingerprint_of_version, loaded_fingerprint
from torture.bucket_servers import BucketServer
from treering.errors import NotFoundError, TreeringError

__all__ = [
    "SCENES",
    "BucketScene",
    "Ended",
    "Place",
    "WrongArrays",
    "is_told",
    "judge_steps",
    "look",
    "open_bucket",
    "send_in_parts",
    "tree_of",
    "version_in",
]

_SIZE: Final = 5000
_LARGE: Final = 1_400_000
"""More than one request puts, once `send_in_parts` was called."""


class WrongArrays(Exception):
    """What was loaded is no tree that was saved."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """One place in a bucket, seen twice.

    Attributes:
        struck: its path through the proxy.
        direct: its path past the proxy.
    """

    struck: Any
    direct: Any
    pair: JointPair | None = None
    """The processes that save there together, through the proxy."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """How what was done ended.

    Attributes:
        error: what it raised; None where it returned.
        found: what it returned.
    """

    error: BaseException | None = None
    found: Any = None


def open_bucket(server: BucketServer, name: str, *, seconds: float = 1.0, patience: float = 4.0) -> Any:
    """Return the path of a server's bucket, known in this process by another name, with a client of its own.

    Args:
        server: the server.
        name: what the bucket is called here.
        seconds: how long a request may take.
        patience: seconds after which nothing is asked again.
    """
    from treering._store.objects.client import ObstoreClient

    store = server.connect(read_timeout=f"{int(seconds * 1000)}ms")
    client = ObstoreClient(store, f"{server.kind}://{name}", timeout=seconds, patience=patience)
    return treering.bucket(client, grace=0)


def send_in_parts() -> None:
    """Let this process send in several requests what is larger than 1 MiB, in the smallest parts that S3 takes."""
    from treering._store.objects import client as obstore_client
    from treering._store.objects import store

    for module, name, size in ((store, "WHOLE_BYTES", 1 << 20), (obstore_client, "_PART_BYTES", 5 << 20)):
        assert hasattr(module, name), name
        setattr(module, name, size)


def tree_of(version: int, size: int = _SIZE) -> dict[str, Any]:
    """Return the tree that has that version; each part of it tells which one it is."""
    numbers = np.arange(size, dtype=np.int32)
    return {"a": numbers * version, "b": {"c": np.full((size // 4, 2), version, np.int32), "version": version}}


def version_in(tree: Any, size: int = _SIZE) -> int:
    """Return the version of a tree that was loaded.

    Raises:
        WrongArrays: it is a mixture, or holds wrong numbers.
    """
    version = int(tree["b"]["version"])
    wanted = tree_of(version, size)
    for name, found, want in (("a", tree["a"], wanted["a"]), ("c", tree["b"]["c"], wanted["b"]["c"])):
        if not np.array_equal(np.asarray(found), want):
            raise WrongArrays(f"{name} is not that of version {version}")
    return version


class BucketScene(abc.ABC):
    """One thing that is done in a bucket."""

    name: str
    """Its name."""
    together = False
    """Whether several processes do it."""

    @abc.abstractmethod
    def prepare(self, place: Place) -> None:
        """Make what is there before, past the proxy."""

    @abc.abstractmethod
    def act(self, place: Place) -> Any:
        """Do it, through the proxy."""

    @abc.abstractmethod
    def judge(self, place: Place, ended: Ended) -> Iterator[str]:
        """Yield what is wrong with what it left, past the proxy."""

    def follow(self, place: Place) -> Callable[[], Iterator[str]] | None:  # noqa: ARG002 - of those that do
        """Do what comes next, past the proxy, before a late request arrives; return the judge of both."""
        return None


class _Saving(BucketScene):
    """One save; version 1 is there before where ``old``."""

    size = _SIZE

    def __init__(self, name: str, *, old: bool, size: int = _SIZE, gone: bool = False) -> None:
        self.name = name
        self.old = old
        self.size = size
        self.gone = gone
        """Whether something was there, and was removed."""

    def prepare(self, place: Place) -> None:
        if self.old:
            treering.save(place.direct, tree_of(1, self.size))
        if self.gone:
            with treering.Run(place.direct, keep=treering.KeepLast(1)) as run:
                run.save(1, tree_of(7)).result()
                run.save(2, tree_of(8)).result()

    def _path(self, path: Any) -> Any:
        return path / "step_00000001" if self.gone else path

    def act(self, place: Place) -> Any:
        treering.save(self._path(place.struck), tree_of(2, self.size), overwrite=self.old)

    def judge(self, place: Place, ended: Ended) -> Iterator[str]:
        found = look(lambda: version_in(treering.load(self._path(place.direct)), self.size))
        allowed = {2} if ended.error is None else {2, 1 if self.old else None}
        if found not in allowed:
            yield f"{found!r} is there; allowed: {allowed}"
        if isinstance(found, int) and not treering.verify(self._path(place.direct)):
            yield "verify finds damage"
        yield from self._next(place)

    def _next(self, place: Place) -> Iterator[str]:
        """Save once more."""
        path = self._path(place.direct)
        error = look(functools.partial(treering.save, path, tree_of(3, self.size), overwrite=True))
        found = look(lambda: version_in(treering.load(path), self.size))
        if found != 3:
            yield f"the next save left {found!r}: {error}"

    def follow(self, place: Place) -> Callable[[], Iterator[str]]:
        path = self._path(place.direct)
        treering.save(path, tree_of(3, self.size), overwrite=True)

        def judge() -> Iterator[str]:
            found = look(lambda: version_in(treering.load(path), self.size))
            if found != 3:
                yield f"{found!r} came back over an acknowledged save"

        return judge


class _Together(BucketScene):
    """Two processes overwrite a checkpoint together."""

    name = "joint save"
    together = True

    def prepare(self, place: Place) -> None:
        treering.save(place.direct, tree_of(1))

    def act(self, place: Place) -> Any:
        assert place.pair is not None
        return place.pair.save(place.direct.name, 2, old=True)

    def judge(self, place: Place, ended: Ended) -> Iterator[str]:
        answers = ended.found or []
        for number, (error, is_ours) in enumerate(answers):
            if not is_ours:
                yield f"process {number} was not told by an error of ours: {error}"
        found = look(lambda: loaded_fingerprint(place.direct))
        is_new = found == fingerprint_of_version(2)
        if not is_new and look(lambda: version_in(treering.load(place.direct))) != 1:
            yield f"{found!r} is there, neither the old nor the new tree"
        if any(not error for error, _ in answers) and not is_new:
            yield "a process was told that it is saved"
        if not treering.verify(place.direct):
            yield "verify finds damage"
        treering.save(place.direct, tree_of(3), overwrite=True)
        if look(lambda: version_in(treering.load(place.direct))) != 3:
            yield "the next save is not there"


class _Retention(BucketScene):
    """A step is saved to a run that keeps two, so that an older one is removed."""

    name = "removal"

    def prepare(self, place: Place) -> None:
        with treering.Run(place.direct, keep=treering.KeepLast(2)) as run:
            for step in (1, 2):
                run.save(step, tree_of(step)).result()

    def act(self, place: Place) -> Any:
        with treering.Run(place.struck, keep=treering.KeepLast(2)) as run:
            run.save(3, tree_of(3)).result()

    def judge(self, place: Place, ended: Ended) -> Iterator[str]:
        yield from judge_steps(place.direct, {2, 3} if ended.error is None else {2}, {1, 2, 3})
        with treering.Run(place.direct, keep=treering.KeepLast(2)) as run:
            error = look(lambda: run.save(4, tree_of(4)).result())
        if isinstance(error, str):
            yield f"the next save failed: {error}"
        yield from judge_steps(place.direct, {4, 3} if ended.error is None else {4}, {1, 2, 3, 4})

    def follow(self, place: Place) -> Callable[[], Iterator[str]]:
        with treering.Run(place.direct, keep=treering.KeepLast(2)) as run:
            run.save(4, tree_of(4)).result()
        return lambda: judge_steps(place.direct, {4}, {1, 2, 3, 4})


class _Collection(BucketScene):
    """A run is collected; a save died in it, and steps wait to go."""

    name = "gc"

    def prepare(self, place: Place) -> None:
        with treering.Run(place.direct) as run:
            for step in range(1, 5):
                run.save(step, tree_of(step)).result()
        treering.save(place.direct / "step_00000004", tree_of(14), overwrite=True)

    def act(self, place: Place) -> Any:
        treering.Run(place.struck, keep=treering.KeepLast(2)).gc(dry_run=False)

    def judge(self, place: Place, ended: Ended) -> Iterator[str]:  # noqa: ARG002
        # A step that could not be read, or was not listed, is left for the next time.
        yield from judge_steps(place.direct, {3, 14}, {1, 2, 3, 14})
        error = look(lambda: len(treering.Run(place.direct, keep=treering.KeepLast(2)).gc(dry_run=False)))
        if isinstance(error, str):
            yield f"the next gc failed: {error}"
        yield from judge_steps(place.direct, {3, 14}, {3, 14})

    def follow(self, place: Place) -> Callable[[], Iterator[str]]:
        treering.save(place.direct / "step_00000001", tree_of(21), overwrite=True)
        treering.save(place.direct / "step_00000004", tree_of(24), overwrite=True)
        return lambda: judge_steps(place.direct, {21, 3, 24}, {21, 2, 3, 24})


class _Loading(BucketScene):
    """One load."""

    name = "load"

    def __init__(self, name: str, size: int = _SIZE) -> None:
        self.name = name
        self.size = size

    def prepare(self, place: Place) -> None:
        treering.save(place.direct, tree_of(1, self.size))

    def act(self, place: Place) -> Any:
        return version_in(treering.load(place.struck), self.size)

    def judge(self, place: Place, ended: Ended) -> Iterator[str]:
        if ended.error is None and ended.found != 1:
            yield f"version {ended.found} was loaded"
        if look(lambda: version_in(treering.load(place.direct), self.size)) != 1:
            yield "the load changed something"


class _Reading(BucketScene):
    """The newest step of a run is found and loaded."""

    name = "latest"

    def prepare(self, place: Place) -> None:
        with treering.Run(place.direct) as run:
            for step in (1, 2):
                run.save(step, tree_of(step)).result()

    def act(self, place: Place) -> Any:
        run = treering.Run(place.struck)
        return run.latest(), version_in(run.load())

    def judge(self, place: Place, ended: Ended) -> Iterator[str]:
        if ended.error is None and ended.found != (2, 2):
            yield f"the newest step and its version were {ended.found}"
        yield from judge_steps(place.direct, {1, 2}, {1, 2})


class _Sharing(BucketScene):
    """A save that shares a file with an older checkpoint, which the server copies, and writes another one."""

    name = "save with a base"

    def prepare(self, place: Place) -> None:
        treering.save(place.direct / "1", _partly_frozen(1))
        treering.save(place.direct / "2", _partly_frozen(2), base=place.direct / "1")

    def act(self, place: Place) -> Any:
        treering.save(place.struck / "3", _partly_frozen(3), base=place.struck / "2")

    def judge(self, place: Place, ended: Ended) -> Iterator[str]:
        for version in (1, 2, 3):
            path = place.direct / str(version)
            found = look(lambda path=path: _version_beside_frozen(treering.load(path)))  # type: ignore[misc]
            if found != version and not (version == 3 and found is None and ended.error is not None):
                yield f"{found!r} is where version {version} was saved"
            if isinstance(found, int) and not treering.verify(path):
                yield f"verify finds damage in version {version}"


def _partly_frozen(version: int) -> dict[str, Any]:
    """Return the tree that has that version, beside what is the same in all of them, and has most of the bytes."""
    return {**tree_of(version), "frozen": np.arange(4 * _SIZE, dtype=np.int32)}


def _version_beside_frozen(tree: Any) -> int:
    if not np.array_equal(np.asarray(tree["frozen"]), _partly_frozen(1)["frozen"]):
        raise WrongArrays("frozen is not what was saved")
    return version_in(tree)


SCENES: Final[tuple[BucketScene, ...]] = (
    _Saving("save", old=False),
    _Saving("overwrite", old=True),
    _Saving("save where a step was removed", old=False, gone=True),
    _Saving("overwrite in parts", old=True, size=_LARGE),
    _Sharing(),
    _Together(),
    _Retention(),
    _Collection(),
    _Loading("load"),
    _Loading("load of ranges", size=_LARGE),
    _Reading(),
)


def judge_steps(
    path: Any, wanted: set[int], allowed: set[int], *, version_of: Callable[[Any], int] = version_in
) -> Iterator[str]:
    """Yield what is wrong with the versions in a run: those that must be there, and those that may."""
    found: set[int] = set()
    run = treering.Run(path)
    steps = look(run.steps)
    if not isinstance(steps, list):
        yield f"the steps cannot be listed: {steps}"
        return
    for step in steps:
        version = look(lambda step=step: version_of(run.load(step)))  # type: ignore[misc]
        if isinstance(version, int):
            found.add(version)
        else:
            yield f"step {step}: {version}"
    if not wanted <= found <= allowed:
        yield f"versions {sorted(found)} are there; wanted {sorted(wanted)} of {sorted(allowed)}"


def look(look: Callable[[], Any]) -> Any:
    """Return the answer of ``look``; None for nothing there; an error as text."""
    try:
        return look()
    except NotFoundError:
        return None
    except (TreeringError, OSError, WrongArrays) as error:
        return f"{type(error).__name__}: {error}"


def is_told(error: BaseException) -> bool:
    """Tell whether an error is one that treering may raise where a bucket fails."""
    return isinstance(error, TreeringError) and isinstance(error, OSError)
