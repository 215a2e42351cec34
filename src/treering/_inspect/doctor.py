"""A folder -> what is committed in it, which attempts to save are in flight or dead, what to do. Nothing is changed.

Neither jax nor numpy is needed, and no array is read: that is `verify`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Final

from treering._checkpoint.detect import detect
from treering._format.diagnosis import Diagnosis, Life
from treering._inspect.attempts import FolderScan, looked_at
from treering._inspect.doctor_attempts import Known, judge_attempts
from treering._store.open_folder import shown_names
from treering._store.resolve import find_at, is_seen
from treering._values import checkpoint_names, leaves_names, timing
from treering._values.human import duration_text
from treering.errors import NotFound, Unsupported

# A save that is committed while we look makes files of the index before vanish.
_TRIES: Final = 5


def diagnose(path: str | os.PathLike[str]) -> Diagnosis:
    """Look at a checkpoint's folder or a leaves directory, also at one that holds only what attempts left there.

    Nothing is locked, written or removed, so a saver that is at work does not notice.

    Raises:
        NotFound: nothing is there, or a folder with nothing of treering's in it.
        Unsupported: it is a file.
        StoreFailed: the system refuses.

    Example:
        >>> import os
        >>> os.mkdir("ckpt")
        >>> diagnose("ckpt").notes
        ('the folder is empty',)
    """
    shown = os.fspath(path)
    if not is_seen(shown):
        detect(shown)  # says what was probably meant
    if (found := find_at(shown)) is not None and found.is_file:
        raise Unsupported(f"{shown!r} is a file; doctor looks at folders", hint="treering verify checks files")
    before = looked_at(shown)
    for _ in range(_TRIES):
        diagnosis = _diagnose_once(shown, before)
        now = looked_at(shown)
        if diagnosis.ok or _still(now) == _still(before):
            return diagnosis
        before = now
    return _diagnose_once(shown, before)


def _still(looked: FolderScan) -> object:
    """Return what stays the same between two looks at a folder in which no process works."""
    # Locks are looked at before names: a process that came between the two would seem dead.
    holders = [(remains.attempt, remains.holder) for remains in (*looked.saved.values(), *looked.staged.values())]
    return looked.names, len(looked.notes), looked.saver, holders


def _diagnose_once(path: str, looked: FolderScan) -> Diagnosis:
    names = set(looked.names)
    has_lock_file = checkpoint_names.LOCK_FILE in names
    known, problems, notes = Known(), list[str](), list[str]()
    removed = [name for name in looked.names if checkpoint_names.attempt_of_tombstone(name)]
    committed, is_removed = None, looked.removed
    if not names.isdisjoint({checkpoint_names.INDEX, leaves_names.INDEX}):
        # Their readers take a moment to import, and a folder of leftovers needs none.
        from treering._inspect.doctor_files import checkpoint_state, leaves_state

        state = checkpoint_state if checkpoint_names.INDEX in names else leaves_state
        committed, known, problems = state(path)
    elif not names and not is_removed:
        notes.append("the folder is empty")
    elif not (
        looked.saved
        or looked.staged
        or looked.notes
        or has_lock_file
        or looked.trouble
        or removed
        or is_removed
        or any(map(checkpoint_names.is_message_folder, names))
    ):
        if leaves_names.ATTEMPTS not in names:
            detect(path)  # says what it is, where it is well known
            raise NotFound(f"there are no files of treering in {path!r}", hint=f"it holds {shown_names(sorted(names))}")
        notes.append("nothing was saved here")
    else:
        notes.append("nothing is committed here")
    if looked.waits is not None:
        notes.append(looked.waits)
    if removed:
        notes.append(f"the removal of a checkpoint here was interrupted: {shown_names(removed)} is removed last")
    if looked.trouble is not None:
        problems.append(f"staged files cannot be inspected: {looked.trouble}")
    attempts = judge_attempts(looked, known, time.time())
    if has_lock_file:
        lives = any(attempt.life is Life.IN_FLIGHT for attempt in attempts)
        what = f"{checkpoint_names.LOCK_FILE} is there, which stands for the lock of the folder"
        (notes if lives else problems).append(what if lives else f"{what}; if no process is saving here, remove it")
    notes.extend(_waiting(looked))
    waits = is_removed and looked.waits is not None and not (attempts or problems or removed or looked.notes)
    return Diagnosis(
        path=path, committed=committed, attempts=attempts, problems=tuple(problems), notes=tuple(notes),
        waits_for_readers=waits,
    )  # fmt: skip


def _waiting(looked: FolderScan) -> Iterator[str]:
    """Say which processes show that they wait for others."""
    for note in looked.notes:
        if note.attempt is None and note.process is not None:
            age = max(time.time() - note.changed, 0.0)
            if age < timing.current.heartbeat_stale:
                yield f"process {note.process} of a job is waiting for others"
            else:
                since = f"process {note.process} of a job waited for others {duration_text(age)} ago"
                yield f"{since} and sends no heartbeat now: it was killed or sleeps; the next save removes its message"
