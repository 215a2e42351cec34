"""The process of one batch of interrupts: strikes at calls of public functions, and judges what each one left."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

import treering as tr
from treering import leaves, serialization
from treering._background import saves
from treering._store.posix import writing

__all__ = ["KINDS", "Scene", "Strike", "judged", "prepared", "scenes"]

_HANG_SECONDS: Final = 60.0
KINDS: Final = ("signal", "place", "system call")
_SYSTEM: Final = frozenset({"posix", "fcntl", "_thread", "_queue"})
# An exception at a place inside these is none of ours: they hold locks and caches of their own.
_FOREIGN: Final = ("/jax/", "/jaxlib/", "<frozen importlib", "/ml_dtypes/")
_OLD: Final = {"w": np.arange(700.0), "b": {"k": jnp.arange(5), "n": 3}, "t": (np.float32(1.5), "text")}
_NEW: Final = {"w": np.arange(700.0) + 1, "b": {"k": jnp.arange(5) + 1, "n": 4}, "t": (np.float32(2.5), "other")}


@dataclasses.dataclass(frozen=True, slots=True)
class Scene:
    """One public call."""

    name: str
    prepare: Callable[[Path], None]
    """Makes what is there before the call."""
    call: Callable[[Path], Any]
    again: Callable[[Path], Any]
    """What has to succeed afterwards, whatever the interrupt left."""
    states: tuple[Any, ...] = ()
    """What ``read`` may give after the interrupt; None where nothing is there."""
    read: Callable[[Path], Any] = lambda _: None


def _is_one_of(found: Any, states: tuple[Any, ...]) -> bool:
    def plain(tree: Any) -> str:
        return "None" if tree is None else repr(serialization.to_bytes(tree))

    return plain(found) in map(plain, states)


def _loaded(path: Path) -> Any:
    try:
        return tr.load(path)
    except tr.errors.NotFoundError:
        return None


def _large(seed: int) -> dict[str, Any]:
    """A tree of which half changes with the seed, so large that what changes is written while the rest is compared."""
    return {"frozen": np.ones(600_000), "changes": np.ones(600_000) + seed}


def _loaded_on_base(path: Path) -> Any:
    return _loaded(path / "2")


def _leaves_loaded(path: Path) -> Any:
    return (
        leaves.tree_deserialize_leaves(path, structure="exact", x64="numpy")
        if (path / "tensorstore_index.json").exists()
        else None
    )


def _run(path: Path) -> tr.Run:
    return tr.Run(path, keep=tr.KeepLast(2))


def _prepared_run(path: Path) -> None:
    with contextlib.closing(_run(path)) as run:
        for step in range(3):
            run.save(step, _OLD, metrics={"loss": float(step)})
        run.wait()


def _use_run(path: Path) -> None:
    with contextlib.closing(_run(path)) as run:
        run.save((run.latest() or 0) + 1, _NEW, metrics={"loss": 1.0})
        run.wait()


def _ask_run(path: Path) -> None:
    with contextlib.closing(_run(path)) as run:
        run.steps(), run.latest(), run.best("loss"), run.metrics(2), run.gc(dry_run=False)
        run.load_or_init(lambda: _OLD)
        run.load()


def _read_open(path: Path) -> None:
    with tr.open(path) as opened:
        np.asarray(opened["w"][3:9])
        np.asarray(opened["b/k"])


def _pending(path: Path, tree: Any) -> None:
    pending = tr.save_async(path, tree, overwrite=True)
    with contextlib.suppress(tr.errors.TimedOutError):
        pending.result(0.0005)
    pending.result()
    pending.result()


def _save_large(path: Path) -> None:
    tr.save(path, {"large": np.ones(700_000)}, overwrite=True)


def _prepared_bases(path: Path) -> None:
    tr.save(path / "0", _large(0))
    tr.save(path / "1", _large(0), base=path / "0")  # digests are noted, so that the next one compares by first blocks


def _save_on_base(path: Path) -> None:
    tr.save(path / "2", _large(1), base=path / "1", overwrite=True)


def scenes() -> list[Scene]:
    """Return the public calls that are struck."""

    def nothing(_: Path) -> None:
        pass

    def old(path: Path) -> None:
        tr.save(path, _OLD)

    def save(path: Path) -> None:
        tr.save(path, _NEW, overwrite=True)

    def leaves_old(path: Path) -> None:
        leaves.tree_serialize_leaves(path, _OLD)

    def leaves_new(path: Path) -> None:
        leaves.tree_serialize_leaves(path, _NEW)

    def unindexed(path: Path) -> None:
        leaves.tree_serialize_leaves(path, _NEW, write_index=False)

    def file_new(path: Path) -> None:
        serialization.save_to_file(_NEW, path)

    def file_old(path: Path) -> None:
        serialization.save_to_file(_OLD, path)

    def file_read(path: Path) -> Any:
        return serialization.load_from_file(_OLD, path) if path.exists() else None

    def with_base(path: Path) -> None:
        tr.save(path / "0", _large(0))
        tr.save(
            path / "1", _large(0), base=path / "0"
        )  # digests are noted, so that the next one compares by first blocks

    def on_base(path: Path) -> None:
        tr.save(path / "2", _large(1), base=path / "1", overwrite=True)

    both = (_OLD, _NEW)
    return [
        Scene("save", nothing, save, save, (None, _NEW), _loaded),
        Scene("overwrite", old, save, save, both, _loaded),
        Scene("save large", nothing, _save_large, _save_large),
        Scene("load large", _save_large, tr.load, _save_large),
        Scene("save with a base", _prepared_bases, _save_on_base, _save_on_base, (None, _large(1)), _loaded_on_base),
        Scene("save_async", old, lambda path: _pending(path, _NEW), save, both, _loaded),
        Scene("load", old, lambda path: tr.load(path, like=_OLD), save),
        Scene("open", old, _read_open, save),
        Scene("verify", old, tr.verify, save),
        Scene("inspect", old, tr.inspect, save),
        Scene("diff", old, lambda path: tr.diff(path, path), save),
        Scene("Run.save", _prepared_run, _use_run, _use_run),
        Scene("Run", _prepared_run, _ask_run, _use_run),
        Scene("tree_serialize_leaves", leaves_old, leaves_new, leaves_new, both, _leaves_loaded),
        Scene("write_index=False", nothing, unindexed, leaves_new),
        Scene("index_leaves", unindexed, leaves.index_leaves, leaves_new),
        Scene("tree_deserialize_leaves", leaves_old, _leaves_loaded, leaves_new),
        Scene("save_to_file", file_old, file_new, file_new, both, file_read),
        Scene("load_from_file", file_old, file_read, file_new),
        Scene("from_bytes", nothing, lambda _: serialization.from_bytes(_OLD, serialization.to_bytes(_NEW)), save),
    ]


class Strike:
    """One interrupt: armed before the call, disarmed after it."""

    def __init__(self, kind: str, at: float) -> None:
        self._kind = kind
        self._left = at
        self.seen = 0.0
        self.struck = False

    def __enter__(self) -> None:
        if self._kind == "signal":
            self.seen = time.perf_counter()
            if self._left < float("inf"):
                signal.setitimer(signal.ITIMER_REAL, max(self._left, 1e-6))
        else:
            sys.setprofile(self._look)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self._kind == "signal":
            self.seen = time.perf_counter() - self.seen

    def _look(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" or any(part in frame.f_code.co_filename for part in _FOREIGN):
            return
        if frame.f_code.co_filename == __file__:
            return
        if self._kind == "system call" and (event != "c_return" or not _is_system_call(frame, called)):
            return
        self.seen += 1
        self._left -= 1
        if self._left <= 0 and not self.struck:
            self.struck = True
            sys.setprofile(None)
            raise KeyboardInterrupt


def _is_system_call(frame: FrameType, called: Any) -> bool:
    # Descriptors are opened inside of other calls of C.
    return getattr(called, "__module__", "") in _SYSTEM or frame.f_code.co_qualname.startswith("OpenDescriptor.")


class _Batch:
    """Strikes, one after the other."""

    def __init__(self, seed: int, names: list[str] | None) -> None:
        self._random = random.Random(seed)
        self._scenes = [scene for scene in scenes() if names is None or scene.name in names]
        memory = Path("/dev/shm")
        self._root = Path(tempfile.mkdtemp(prefix="treering-", dir=memory if memory.is_dir() else None))
        self._lengths: dict[tuple[str, str], float] = {}
        self._lost = 0
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        sys.unraisablehook = self._note_lost
        writing.DIRECT_FROM, writing.FREE_SHARE = 4 << 20, 0.0  # let threads write, too
        writing.BLOCK_BYTES = 1 << 20

    def _note_lost(self, what: Any) -> None:
        if isinstance(what.exc_value, KeyboardInterrupt):
            self._lost += 1
        else:
            sys.__unraisablehook__(what)

    def run(self, count: int) -> None:
        """Warm every scene up, then strike."""
        try:
            for scene in self._scenes:
                for _ in range(2):
                    path = self._prepared(scene)
                    scene.call(path)
                    scene.again(path)
                    shutil.rmtree(path.parent)
                for kind in KINDS:
                    path = self._prepared(scene)
                    strike = Strike(kind, float("inf"))
                    with strike:
                        scene.call(path)
                    self._lengths[scene.name, kind] = strike.seen
                    shutil.rmtree(path.parent)
            gc.collect()
            gc.freeze()
            for _ in range(count):
                faulthandler.dump_traceback_later(_HANG_SECONDS, exit=True)
                self._strike(self._random.choice(self._scenes), self._random.choice(KINDS))
        finally:
            faulthandler.cancel_dump_traceback_later()
            shutil.rmtree(self._root, ignore_errors=True)

    def _prepared(self, scene: Scene) -> Path:
        return prepared(scene, self._root)

    def _strike(self, scene: Scene, kind: str) -> None:
        length = self._lengths[scene.name, kind]
        at = (
            self._random.uniform(0, length * 1.05) if kind == "signal" else self._random.randint(1, max(1, int(length)))
        )
        lost = self._lost
        outcome, wrong = judged(scene, Strike(kind, at), self._root)
        if self._lost > lost:
            outcome = "lost in a finalizer"
        print(json.dumps(["outcomes", f"{kind}: {outcome}"]))
        if wrong:
            told = f"{scene.name}, {kind} at {at:g} of {length:g}: {'; '.join(wrong)}"
            print(json.dumps(["violations", told]))


def prepared(scene: Scene, root: Path) -> Path:
    """Make what the scene's call finds, in a new folder."""
    path = Path(tempfile.mkdtemp(dir=root), "x")
    scene.prepare(path)
    return path


def judged(scene: Scene, strike: Strike, root: Path) -> tuple[str, list[str]]:
    """Strike once; return how the call ended, and what must not be."""
    path = prepared(scene, root)
    before = _descriptors()
    held = _interrupted(strike, scene, path)
    wrong = []
    if held is not None and not _is_interrupt(held):
        wrong.append(f"raised {held!r}")
    try:
        if scene.states and not _is_one_of(scene.read(path), scene.states):
            wrong.append("neither the old nor the new content")
        scene.again(path)  # while the traceback is held, as an interactive session does
    except BaseException as error:  # noqa: BLE001 - it is what is looked for
        wrong.append("the next call raised " + "".join(traceback.format_exception_only(error)).strip())
    outcome, where = "through" if held is None else "interrupted", _where(held)
    del held
    saves.wait_for(path, _HANG_SECONDS / 2)
    if _descriptors() - before:
        gc.collect()
    if more := _descriptors() - before:
        wrong.append(f"left open: {sorted(more)}")
    if wrong:
        wrong.append(f"struck at {where}")
    shutil.rmtree(path.parent, ignore_errors=True)
    return outcome, wrong


def _interrupted(strike: Strike, scene: Scene, path: Path) -> BaseException | None:
    try:
        with strike:
            scene.call(path)
    except BaseException as error:  # noqa: BLE001 - the interrupt, or what it was turned into
        return error
    return None


def _is_interrupt(error: BaseException) -> bool:
    """Whether it is the interrupt; jax turns one that strikes while it compares keys of a cache into a ValueError."""
    return isinstance(error, KeyboardInterrupt) or (
        isinstance(error, ValueError)
        and str(error).startswith("Cache keys should be comparable")
        and "\nKeyboardInterrupt" in str(error)
    )


def _where(error: BaseException | None) -> str:
    if error is None:
        return "-"
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames[-6:]))


def _descriptors() -> set[tuple[int, str]]:
    def found() -> Iterator[tuple[int, str]]:
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                yield int(entry.name), os.fspath(entry.readlink())

    return {one for one in found() if "/proc/" not in one[1]}


def main() -> None:
    """Run the batch that the command line orders; one JSON line for each strike."""
    order = json.loads(sys.argv[1])
    _Batch(order["seed"], order["scenes"]).run(order["count"])
    if threading.active_count() > 20:
        print(json.dumps(["violations", f"{threading.active_count()} threads are left"]))


if __name__ == "__main__":
    main()
