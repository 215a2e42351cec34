"""Errors and kills at every call of a save in the background: whoever began it hears of errors, however he listens."""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import json
import os
import select
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from torture.children import PATIENCE_SECONDS, Answer, in_child
from torture.faults import Fault, Injector, Kind
from torture.judging import NEW, fresh, next_save, told
from torture.points import Report, tell
from torture.run_scenes import IN_BACKGROUND, BackgroundScene, RunScene
from torture.scenes import OLD

__all__ = ["HEARINGS", "Hearing", "fail_runs", "sweep_run"]

Hearing: TypeAlias = Literal["result", "the next call", "the end"]
HEARINGS: Final[tuple[Hearing, ...]] = ("result", "the next call", "the end")
"""How the caller hears of an error: he asks; he goes on; he leaves."""

_KILLS: Final = (Kind.KILL_BEFORE, Kind.KILL_AFTER)
_ERRORS: Final = [kind for kind in Kind if kind not in _KILLS]
# Words by which an error says that what was saved is there all the same.
_THERE: Final = ("in place", "committed")
# Whatever of a save is refused here may be lost in a power cut, though it is there now.
_NEVER_HARMLESS: Final = frozenset({"fsync", "pwrite", "sync_file_system", "write"})
_LOOK_SECONDS: Final = 0.001


def fail_runs(names: Sequence[str] | None, hearings: Sequence[Hearing] | None, stride: int) -> int:
    """Let every error strike at every call of the scenes of those names (None: all), and print what was found.

    Args:
        names: of the scenes.
        hearings: the ways to hear of it; None: all.
        stride: 1 for every call.

    Returns:
        The exit code: 1 when an error was swallowed, something was lost, or somebody waits for ever.
    """
    # jax dislikes every fork; no device and no thread has been started here.
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    bad = False
    # No TemporaryDirectory: a child that ends as programs do would remove it.
    folder = Path(tempfile.mkdtemp(prefix="treering-failures-"))
    try:
        for hearing in hearings or HEARINGS:
            report = Report()
            for scene in IN_BACKGROUND:
                if names is None or scene.name in names:
                    # Who is killed hears nothing, however he listens.
                    kinds = [*_ERRORS, *_KILLS] if hearing == "result" else _ERRORS
                    sweep_run(scene, folder / "scene", report, hearing, kinds, stride=stride)
                    print(f"{scene.name}: done, heard by {hearing}", flush=True)
            tell(f"every call of a save in the background, heard by {hearing}", report)
            bad = bad or bool(report.violations)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if bad else 0


def sweep_run(
    scene: BackgroundScene | RunScene,
    base: Path,
    report: Report,
    hearing: Hearing,
    kinds: Iterable[Kind] = _ERRORS,
    *,
    stride: int = 1,
) -> None:
    """Let every fault strike at every call of one save, or at every few calls, other ones for each kind.

    Raises:
        RuntimeError: the save fails undisturbed.
    """
    path = scene.prepared(base)
    scene.found(path)  # what is imported or cached at the first time is no part of the others
    calls = _rehearsed(scene, base, hearing)
    gc.collect()
    gc.freeze()  # children that collect nothing copy fewer pages
    for number, kind in enumerate(kinds):
        for at, call in enumerate(calls, 1):
            if not kind.applies_to(call) or (at + number) % stride:
                continue
            path = scene.prepared(base)
            answer = _attacked(scene, path, hearing, Fault(kind=kind, at=at))
            report.count(kind.value, answer)
            for wrong in _judged(scene, path, answer, kind, call):
                report.violations.append(
                    f"{scene.name}, heard by {hearing}: {kind.value} at call {at} ({call}): {wrong}"
                )


def _rehearsed(scene: BackgroundScene | RunScene, base: Path, hearing: Hearing) -> list[str]:
    """Return the calls of an undisturbed save."""
    for _ in range(2):  # the first time, threads and modules are new
        path = scene.prepared(base)
        answer = _attacked(scene, path, hearing, None)
        found = fresh(functools.partial(scene.found, path))
        if not answer.acknowledged or found != scene.ledger(NEW):
            raise RuntimeError(f"{scene.name}: the undisturbed save failed: {answer.error or found}")
    return answer.calls


def _attacked(scene: BackgroundScene | RunScene, path: Path, hearing: Hearing, fault: Fault | None) -> Answer:
    injector = _Pausing(fault)
    if hearing == "the end":
        return _leaving(functools.partial(_begun, scene, path, injector), path, injector)
    return in_child(functools.partial(_heard, scene, path, injector, hearing), path, injector.calls)


class _Pausing(Injector):
    """An injector that can be told that the save is over: what comes after is not attacked."""

    def __init__(self, fault: Fault | None) -> None:
        super().__init__(fault)
        self.over = False

    def strikes(self, count: int) -> bool:
        """Whether the fault strikes at this call."""
        return not self.over and super().strikes(count)


def _begun(scene: BackgroundScene | RunScene, path: Path, injector: _Pausing) -> Any:
    scene.configure()
    injector.install()
    return scene.begin(path, NEW, old=scene.old)


def _heard(scene: BackgroundScene | RunScene, path: Path, injector: _Pausing, hearing: Hearing) -> None:
    """Save, and hear what became of it."""
    pending = _begun(scene, path, injector)
    if hearing == "result":
        pending.result(PATIENCE_SECONDS)
        return
    # Nobody asks; whoever loads from there next, or saves, is told.
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not pending.done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path}: not done")
        time.sleep(_LOOK_SECONDS)
    injector.over = True
    scene.go_on(path)


def _leaving(begin: Callable[[], Any], path: Path, injector: Injector) -> Answer:
    """Begin a save in a child and leave, as a program does whose last line that is; read what it says then."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _leave(begin, writer, injector)
        finally:
            os._exit(3)
    os.close(writer)
    parts: list[bytes] = []
    hung = False
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not hung:
        hung = not select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]
        part = b"" if hung else os.read(reader, 1 << 16)
        if not part:
            break
        parts.append(part)
    if hung:
        os.kill(pid, signal.SIGKILL)
    os.close(reader)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    said = b"".join(parts).decode(errors="replace")
    # Two lines of the harness: which calls were made, and what `begin` raised; all the rest is what a person reads.
    lines = said.splitlines()
    calls: list[str] = next((json.loads(line[len(_CALLS) :]) for line in lines if line.startswith(_CALLS)), [])
    raised = next((json.loads(line[len(_RAISED) :]) for line in lines if line.startswith(_RAISED)), None)
    rest = [line for line in lines if not line.startswith((_CALLS, _RAISED))]
    wrong = list(_ways_to_leave(code, rest, raised, path))
    error = raised or ("\n".join(rest) if code else None)
    return Answer(acknowledged=code == 0, error=error, ours=not wrong, kept=wrong, calls=calls, hung=hung)


_CALLS: Final = "@calls "
_RAISED: Final = "@raised "


def _leave(begin: Callable[[], Any], pipe: int, injector: Injector) -> None:
    """Be a program that begins a save and ends; what it prints goes into the pipe."""
    write = os.write
    os.dup2(pipe, 2)
    atexit.register(lambda: write(pipe, f"{_CALLS}{json.dumps(injector.calls)}\n".encode()))
    code = 0
    try:
        begin()
    except OSError as error:
        write(pipe, f"{_RAISED}{json.dumps(f'{type(error).__name__}: {error}')}\n".encode())
        code = 1
    # The whole end of an interpreter, and nothing of what stands further up on this stack.
    ctypes.pythonapi.Py_Exit(code)


def _ways_to_leave(code: int, lines: Sequence[str], raised: str | None, path: Path) -> Iterator[str]:
    """Say what is wrong with how a program left."""
    if code == 0 and lines:
        yield f"ended well, and said {lines}"
    if code not in (0, 1):
        yield f"ended with {code}"
    if code and raised is None and len(lines) != 1:
        yield f"said {len(lines)} lines: {lines}"
    if code and raised is None and lines and str(path) not in lines[0]:
        yield f"does not name the path: {lines}"


def _judged(scene: BackgroundScene | RunScene, path: Path, answer: Answer, kind: Kind, call: str) -> list[str]:
    wrong = fresh(lambda: list(_wrongs(scene, path, answer, kind, call)))
    return wrong if isinstance(wrong, list) else [f"the judge failed: {wrong}"]


def _wrongs(scene: BackgroundScene | RunScene, path: Path, answer: Answer, kind: Kind, call: str) -> Iterator[str]:
    found = told(lambda: scene.found(path))
    old = scene.ledger(OLD) if scene.old else None
    new = scene.ledger(NEW)
    there = answer.error is not None and any(word in answer.error for word in _THERE)
    if answer.hung:
        yield "hung"
    if found not in (old, new):
        yield f"neither the old nor the new state: {found}"
    if answer.acknowledged and found != new:
        yield "nobody was told, and it is not there"
    if answer.acknowledged and kind is not Kind.SHORT and call in _NEVER_HARMLESS:
        yield "nobody was told"
    if answer.error and found == new and not there:
        yield f"there, and the error does not say so: {answer.error}"
    if not answer.acknowledged and not answer.error and kind not in _KILLS:
        yield "no answer"
    if not answer.ours:
        yield f"not our error, or the path is not named: {answer.error}"
    if kept := [one for one in answer.kept if not one.startswith("treering-saves")]:
        yield f"kept {kept}"
    yield from scene.harmed(path)
    # What is left by a kill, or after the commit, is swept by the next save, and so is what could not be removed.
    swept = (
        not there and kind not in _KILLS and not scene.leftover and not call.startswith(("mkdir", "unlink", "rmdir"))
    )
    # Of a run these are names; that an older step is there is right as long as nothing new is.
    if swept and (left := [one for one in scene.litter(path) if not one.startswith("step ")]):
        yield f"left {left} behind"
    yield from next_save(scene, path, old=found is not None)
