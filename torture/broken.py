"""Promises that are broken on purpose: proof that the attacks would notice.

``python -m torture.broken "nothing is ever swept" run --kills 4`` attacks a treering that keeps all promises but one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torture import __main__ as torture

__all__ = ["PROMISES", "break_promise"]


def break_promise(name: str) -> None:
    """Break the promise of that name in `PROMISES`: in this process and in those that it forks, for good."""
    PROMISES[name]()


def _set(owner: Any, name: str, value: Any) -> None:
    assert hasattr(owner, name), f"{owner} has no {name}: what is broken here has moved"
    setattr(owner, name, value)


# ------------------------------------------------------------------------------------------------ one step of a commit


def _leave_out_last_sync() -> None:
    from treering._store.posix.folder import Folder

    sync = Folder.sync

    def sync_while_staged(folder: Folder) -> None:
        if any(name.endswith("-tmp") for name in folder.names()):
            sync(folder)

    _set(Folder, "sync", sync_while_staged)


def _leave_out_sync_of_data() -> None:
    from treering._store.posix import descriptors

    sync = descriptors.sync

    def sync_others(descriptor: int) -> None:
        if "data-" not in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            sync(descriptor)

    _set(descriptors, "sync", sync_others)


def _leave_out_syncfs() -> None:
    from treering._store.posix import descriptors

    _set(descriptors, "sync_file_system", lambda _: True)


# ---------------------------------------------------------------------------------------------------------------- runs


def _acknowledge_early() -> None:
    from treering._background.writer import PendingSave, Writer

    work = Writer._do

    def work_late(self: Writer, *given: Any) -> None:
        time.sleep(0.3)
        work(self, *given)

    _set(PendingSave, "result", lambda self, timeout=None: None)  # noqa: ARG005 - as it is called
    _set(Writer, "_do", work_late)


def _swallow_late_errors() -> None:
    from treering._background.writer import Writer

    _set(Writer, "take_failed", lambda self, path=None: [])  # noqa: ARG005 - as it is called


def _remove_later_steps_one_by_one() -> None:
    from treering._runs import gc, save_step
    from treering._runs.folder import RunFolder

    def remove_first(run: Any, step: int, order: save_step.Order, **given: Any) -> None:
        gc.remove_steps(run.path, order.left)
        collect_after(run, step, order, **given)

    collect_after = save_step.collect_after
    _set(RunFolder, "read_superseded", lambda _: None)
    _set(save_step, "collect_after", remove_first)


def _sweep_nothing() -> None:
    from treering._runs import save_step

    _set(save_step, "collect_after", lambda *_, **__: None)


# -------------------------------------------------------------------------------------------------- processes of a job


def _decide_before_commit() -> None:
    from treering._checkpoint import joint_driver
    from treering._coordination.messages import DecisionMessage
    from treering._coordination.operations import Call, Commit, Operations, Put
    from treering._values.checkpoint_names import decision_name

    driver: Any = joint_driver
    coordinate = driver.coordinate

    def decide_first(call: Call, signature: bytes) -> Operations:
        steps, answer = coordinate(call, signature), None
        with contextlib.suppress(StopIteration):
            while True:
                step = steps.send(answer)
                if isinstance(step, Commit):
                    yield Put(decision_name(call.attempt), DecisionMessage(who=call.who).encode())
                answer = yield step

    _set(driver, "coordinate", decide_first)


def _swallow_decision() -> None:
    from treering._checkpoint import joint_driver
    from treering._coordination.operations import Call, Operations
    from treering.errors import TreeringError

    driver: Any = joint_driver
    participate = driver.participate

    def swallow(call: Call, check: Callable[[bytes], None]) -> Operations:
        with contextlib.suppress(TreeringError):
            yield from participate(call, check)

    _set(driver, "participate", swallow)


def _leave_files() -> None:
    from treering._checkpoint.transaction import JoinedFolder

    _set(JoinedFolder, "abort", lambda _: None)


def _move_a_point() -> None:
    from torture import process_table

    _set(process_table, "_OVERWRITE", (dataclasses.replace(process_table._OVERWRITE[0], nth=2),))


PROMISES: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "no last fsync": _leave_out_last_sync,
    "no fsync of data": _leave_out_sync_of_data,
    "no syncfs": _leave_out_syncfs,
    "it says so before it is saved": _acknowledge_early,
    "late errors are swallowed": _swallow_late_errors,
    "later steps go one by one": _remove_later_steps_one_by_one,
    "nothing is ever swept": _sweep_nothing,
    "process 0 says so before it commits": _decide_before_commit,
    "others swallow the verdict": _swallow_decision,
    "others leave their files": _leave_files,
    "a point has moved": _move_a_point,
}
"""What is broken, and how."""


if __name__ == "__main__":
    break_promise(sys.argv.pop(1))
    sys.exit(torture.main())
