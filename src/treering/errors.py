"""The errors of treering, sorted by what a caller would do about them.

    TreeringError
    ├── NotFoundError       nothing is stored there: check the path       (FileNotFoundError)
    │   └── DataFileMissingError  a store lacks a file of an index; others raise CorruptError
    ├── ExistsError         the path exists: pass overwrite=True          (FileExistsError)
    ├── BusyError           another process or thread saves: try later     (OSError)
    ├── MismatchError       data and target disagree: change the target   (ValueError)
    ├── CorruptError        the bytes are damaged: use another copy       (ValueError)
    ├── FormatError         another form or version: use another reader   (ValueError)
    │   └── LinkRefusedError  a file is a link: copy what it leads to
    ├── UnsupportedError    cannot be stored, or is no such argument      (TypeError, ValueError)
    │   ├── NoMemoryError   an array is larger than the memory: load less (MemoryError)
    │   └── TooDeepError    a tree has too many levels, or holds itself
    ├── NoSuchLeafError     an open checkpoint has no leaf of that key    (KeyError)
    ├── ClosedError         a run or checkpoint was closed: open it again (ValueError)
    ├── LeaseLostError      a lease on a step has ended: hold it again
    ├── TimedOutError       other processes did not arrive: check them    (TimeoutError)
    ├── StoreError          the system refused: free space, fix rights    (OSError)
    │   ├── NotSharedError  the processes see different folders           (OSError)
    │   └── PermissionDeniedError, IsDirectoryError, NotDirectoryError    (PermissionError ...)
    ├── MissingExtraError   an optional package is missing: install it    (ImportError)
    ├── ProcessFailedError  another process failed: its error says why    (RuntimeError)
    └── CancelledError      a save in flight was cancelled: save again

Each is also of the builtin class that a program written for
``flax.serialization`` expects. If flax raises a further class for one case
(``KeyError``, ``AttributeError``, ``OverflowError`` ...), a private subclass
adds that class, so ``except`` clauses keep working.

A message names the leaf, what was wanted, what was found and what to do.

The names of before, without ``Error`` and ``Warning`` at their ends, still lead to these classes, with a
``DeprecationWarning``: an ``except`` clause that named a missing class would fail while it handles an error.
"""

from __future__ import annotations

import errno
import os
import warnings
from typing import TYPE_CHECKING

from treering._printable import cut_middle, cut_names, hide_secrets, printable, show_path

__all__ = [
    "BusyError", "CancelledError", "ClosedError", "CorruptError", "DataFileMissingError", "ExistsError", "FormatError",
    "IsDirectoryError", "KeptOnHostWarning", "LeaseLostError", "LeavesInitialisedWarning", "LinkRefusedError",
    "MismatchError", "MissingExtraError", "NoMemoryError", "NoSuchLeafError", "NotDirectoryError", "NotFencedWarning",
    "NotFoundError", "NotRemovedWarning", "NotShardedWarning", "NotSharedError", "PermissionDeniedError",
    "ProcessFailedError", "RulesUnmatchedWarning", "SaveFailedWarning", "SavesFailedError", "StaticFieldsDifferWarning",
    "StepPassedOverWarning", "StepsNotSavedWarning", "StoreError", "TimedOutError", "TooDeepError", "TreeringError",
    "UnknownMetricWarning", "UnsupportedError",
]  # fmt: skip

_LONGEST_PATH = 400
_OTHER_NAMES = {"Timeout": "TimedOutError", "StoreFailed": "StoreError"}


class TreeringError(Exception):
    """Base of every error that treering raises on purpose.

    Attributes:
        path: key path of the leaf or branch concerned, outermost part first, or None.
        offset: byte offset in the file or buffer, or None.
        hint: what to do about it, or None.

    Example:
        >>> import treering.errors
        >>> error = treering.errors.CorruptError("the array is cut short", path=("a", "b"), offset=12)
        >>> print(error)
        the array is cut short (at leaf 'a/b', byte 12)
        >>> isinstance(error, ValueError)
        True
    """

    path: tuple[str, ...] | None = None
    offset: int | None = None
    hint: str | None = None

    def __init__(
        self, message: str, *, path: tuple[str, ...] | None = None, offset: int | None = None, hint: str | None = None
    ) -> None:
        self.message = message = hide_secrets(message)
        super().__init__(message)
        self.path = path
        self.offset = offset
        self.hint = None if hint is None else hide_secrets(hint)

    def __str__(self) -> str:
        keys = self.path or ()
        if len(keys) > _LONGEST_PATH:  # the middle of an absurdly long one is left out
            keys = (*keys[:8], f"[{len(keys) - 16} keys left out]", *keys[-8:])
        places = [f"leaf {cut_middle('/'.join(keys), _LONGEST_PATH)!r}"] if keys else []
        places += [] if self.offset is None else [f"byte {self.offset}"]
        where = f" (at {', '.join(places)})" if places else ""
        hint = f"; {self.hint}" if self.hint else ""
        return printable(hide_secrets(cut_names(f"{self.message}{where}{hint}")), lines=True)

    def __reduce__(self) -> tuple[object, ...]:
        # Attributes survive the trip between processes (pytest-xdist, futures); an OSError has three beside its dict.
        names = ("errno", "strerror", "filename") if isinstance(self, OSError) else ()
        return (_rebuild, (type(self), self.message, self.__dict__ | {name: getattr(self, name) for name in names}))


def _rebuild(cls: type[TreeringError], message: str, state: dict[str, object]) -> TreeringError:
    # By name: of a class that is a ValueError before it is an OSError, ``cls.__new__`` is that of the former.
    make = OSError.__new__ if issubclass(cls, OSError) else cls.__new__
    error = make(cls, message)
    Exception.__init__(error, message)
    for name, value in state.items():
        setattr(error, name, value)
    return error


class NotFoundError(TreeringError, FileNotFoundError):
    """Nothing is stored at the path. Check the path; nothing was created."""


class DataFileMissingError(NotFoundError):
    """A store lacks a file that the index names. After an overwrite a newer index names others: read it again.

    `treering.load` and all other functions do so, and raise `CorruptError` where the index still names it, so that no
    program takes a damaged checkpoint for one that was never saved. You may meet this error as its ``__cause__``.

    Attributes:
        name: the missing file.
    """

    name = ""


class NoSuchLeafError(TreeringError, KeyError):
    """No leaf has that key; mappings raise ``KeyError``."""


class ClosedError(TreeringError, ValueError):
    """The run or the checkpoint was closed; files say ``ValueError`` then."""


class MismatchError(TreeringError, ValueError):
    """The stored tree and the target disagree in structure, shape or dtype.

    Attributes:
        differences: one line for each difference, in tree order; empty if there is only the message.
    """

    differences: tuple[str, ...] = ()


class CorruptError(TreeringError, ValueError):
    """The bytes are truncated, overlong, or damaged. Use another copy."""


class FormatError(TreeringError, ValueError):
    """The bytes are not in a form this version reads: another tool, or a newer version."""


class LinkRefusedError(FormatError):
    """A file of a checkpoint is a link, which may lead anywhere. That is no damage: a plain copy can be read."""


class UnsupportedError(TreeringError, TypeError, ValueError):
    """treering cannot store or place this without changing it, or an argument has no meaning: nothing was done."""


class TooDeepError(UnsupportedError):
    """A tree has more levels than a file may have; it may hold itself."""


class NoMemoryError(UnsupportedError, MemoryError):
    """An array is larger than the memory that the system gives; numpy raises MemoryError."""


class StoreError(TreeringError, OSError):
    """The operating system refused a read or a write; ``errno`` and ``filename`` say which.

    Example:
        >>> import errno
        >>> error = StoreError.of(OSError(errno.ENOSPC, "No space left on device"), "a.msgpack", "write")
        >>> error.errno == errno.ENOSPC
        True
        >>> print(error)
        could not write 'a.msgpack': No space left on device
    """

    @classmethod
    def of(cls, cause: OSError, path: str | os.PathLike[str], action: str, *, hint: str | None = None) -> TreeringError:
        """Wrap ``cause``; it stays an instance of the builtin class that ``cause`` has.

        A missing file becomes ``NotFoundError``; EACCES and EPERM are also ``PermissionError``, EISDIR is also
        ``IsADirectoryError``, ENOTDIR is also ``NotADirectoryError``.
        """
        shown = show_path(os.fspath(path))
        reason = hide_secrets(cause.strerror or str(cause))
        by_errno: dict[int | None, type[TreeringError]] = {
            errno.ENOENT: NotFoundError,
            errno.EACCES: PermissionDeniedError,
            errno.EPERM: PermissionDeniedError,
            errno.EISDIR: IsDirectoryError,
            errno.ENOTDIR: NotDirectoryError,
        }
        error = by_errno.get(cause.errno, cls)(f"could not {action} {shown!r}: {reason}", hint=hint)
        if isinstance(error, OSError):
            error.errno, error.filename, error.strerror = cause.errno, shown, reason
        return error


class ExistsError(TreeringError, FileExistsError):
    """The path exists already; it was not changed."""


class BusyError(TreeringError, OSError):
    """Another process or thread is saving to the path. Try again when it is done; nothing was changed."""


class TimedOutError(TreeringError, TimeoutError):
    """Other processes of the job did not arrive or answer in time. Find out what happened to them.

    Attributes:
        missing: their numbers, if they are known.
    """

    def __init__(self, message: str, *, hint: str | None = None, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.missing = missing


class ProcessFailedError(TreeringError, RuntimeError):
    """Another process of the job failed, so no process saved or loaded anything.

    Attributes:
        processes: the numbers of the processes that failed.
    """

    processes: tuple[int, ...] = ()


class MissingExtraError(TreeringError, ImportError):  # type: ignore[misc]  # path is a key path, never that of a module
    """A package that only some paths need is not installed; the hint has the command."""


class CancelledError(TreeringError):
    """A save in flight was cancelled before its commit, here or on another process. Its path is unchanged."""


class SavesFailedError(TreeringError):
    """A run that warns of failed saves had ``max_failures`` of them in a row; the last one is the ``__cause__``."""


class LeaseLostError(TreeringError):
    """A lease on a step has ended before it was released: the step may be gone."""


class NotSharedError(StoreError):
    """The path is not one folder for all processes of the job. Use a file system that all of them share.

    Attributes:
        processes: the numbers of the processes that do not see what process 0 writes.
    """

    processes: tuple[int, ...] = ()


class PermissionDeniedError(StoreError, PermissionError):
    """EACCES or EPERM."""


class IsDirectoryError(StoreError, IsADirectoryError):
    """EISDIR: a folder where a file is expected."""


class NotDirectoryError(StoreError, NotADirectoryError):
    """ENOTDIR: a file where a folder is expected."""


class StaticFieldsDifferWarning(UserWarning):
    """Static fields or functions of ``like`` differ from those that were saved; those of ``like`` were taken."""


class KeptOnHostWarning(UserWarning):
    """Arrays that were meant for devices stayed numpy, because jax as configured cannot hold their dtype."""


class LeavesInitialisedWarning(UserWarning):
    """``Run.load_or_init`` found a step without some leaves of ``init_fn``'s tree, and initialised those."""


class UnknownMetricWarning(UserWarning):
    """A rule of a run names a metric that no step has, so it keeps all steps."""


class SaveFailedWarning(UserWarning):
    """A save of a run with ``on_save_error="warn"`` failed; the text says why, and training goes on."""


class StepsNotSavedWarning(UserWarning):
    """A run ended, and steps that a training loop offered since the last save are not in it."""


class StepPassedOverWarning(UserWarning):
    """A run was resumed from another step than its newest, because that is damaged, crashes, or was left behind.

    It says of each step why; of damage the leaf and the file.
    """


class NotShardedWarning(UserWarning):
    """Arrays stay where they are: the sharding tree does not fit them."""


class NotFencedWarning(UserWarning):
    """A late request of an earlier save may undo that of this single file, for nothing in the bucket can refuse it."""


class NotRemovedWarning(UserWarning):
    """Data that nothing needs stay in a bucket, because the credentials may not remove them; reported once."""


class RulesUnmatchedWarning(UserWarning):
    """A partition rule matches no key, or only a catch-all matches some leaves; reported once."""


if not TYPE_CHECKING:  # a type checker is to refuse the old names

    def __getattr__(name: str) -> type[TreeringError | UserWarning]:
        new = next((one for one in (_OTHER_NAMES.get(name), f"{name}Error", f"{name}Warning") if one in __all__), None)
        if new is None:
            raise AttributeError(f"module 'treering.errors' has no attribute {name!r}")
        warnings.warn(f"treering.errors.{name} is called {new} now", DeprecationWarning, stacklevel=2)
        found: type[TreeringError | UserWarning] = globals()[new]
        return found
