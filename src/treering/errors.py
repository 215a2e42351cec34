"""The errors of treering, sorted by what a caller would do about them.

    TreeringError
    ├── NotFound       nothing is stored there: check the path       (FileNotFoundError)
    ├── Exists         the path exists: pass overwrite=True          (FileExistsError)
    ├── Busy           another process is saving: try again later    (OSError)
    ├── Mismatch       data and target disagree: change the target   (ValueError)
    ├── Corrupt        the bytes are damaged: use another copy       (ValueError)
    ├── Format         another form or version: use another reader   (ValueError)
    ├── Unsupported    cannot be stored or placed: change the tree   (TypeError, ValueError)
    ├── Timeout        other processes did not arrive: check them    (TimeoutError)
    ├── StoreFailed    the system refused: free space, fix rights    (OSError)
    │   └── NotShared  the processes see different folders           (OSError)
    ├── MissingExtra   an optional package is missing: install it    (ImportError)
    ├── ProcessFailed  another process failed: its error says why    (RuntimeError)
    └── Cancelled      a save in flight was cancelled: save again

Each is also of the builtin class that a program written for
``flax.serialization`` expects. If flax raises a further class for one case
(``KeyError``, ``AttributeError``, ``OverflowError`` ...), a private subclass
adds that class, so ``except`` clauses keep working.

A message names the leaf, what was wanted, what was found and what to do.
"""

from __future__ import annotations

import errno
import os

from treering._printable import cut_middle, cut_names, hide_secrets, printable, show_path

__all__ = [
    "Busy", "Cancelled", "Corrupt", "Exists", "Format", "KeptOnHost", "LeavesInitialised", "Mismatch", "MissingExtra",
    "NotFound", "NotSharded", "NotShared", "ProcessFailed", "StaticFieldsDiffer", "StoreFailed", "Timeout",
    "TreeringError", "UnknownMetric", "Unsupported",
]  # fmt: skip

_LONGEST_PATH = 400


def _shown_path(path: tuple[str, ...]) -> str:
    """Join a key path for people; the middle of an absurdly long one is left out."""
    left_out = f"[{len(path) - 16} keys left out]"
    shown = path if len(path) <= _LONGEST_PATH else (*path[:8], left_out, *path[-8:])
    return cut_middle("/".join(shown), _LONGEST_PATH)


class TreeringError(Exception):
    """Base of every error that treering raises on purpose.

    Attributes:
        path: key path of the leaf or branch concerned, outermost part first, or None.
        offset: byte offset in the file or buffer, or None.
        hint: what to do about it, or None.

    Example:
        >>> import treering.errors
        >>> error = treering.errors.Corrupt("the array is cut short", path=("a", "b"), offset=12)
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
        places = [f"leaf {_shown_path(self.path)!r}"] if self.path else []
        places += [] if self.offset is None else [f"byte {self.offset}"]
        where = f" (at {', '.join(places)})" if places else ""
        hint = f"; {self.hint}" if self.hint else ""
        return printable(hide_secrets(cut_names(f"{self.message}{where}{hint}")), lines=True)

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only attributes survive the trip between processes (pytest-xdist, futures).
        return (_rebuild, (type(self), self.message, self.__dict__))


def _rebuild(cls: type[TreeringError], message: str, state: dict[str, object]) -> TreeringError:
    error = cls.__new__(cls, message)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class NotFound(TreeringError, FileNotFoundError):
    """Nothing is stored at the path. Check the path; nothing was created."""


class Mismatch(TreeringError, ValueError):
    """The stored tree and the target disagree in structure, shape or dtype.

    Attributes:
        differences: one line for each difference, in tree order; empty if there is only the message.
    """

    differences: tuple[str, ...] = ()


class Corrupt(TreeringError, ValueError):
    """The bytes are truncated, overlong, or damaged. Use another copy."""


class Format(TreeringError, ValueError):
    """The bytes are not in a form this version reads: another tool, or a newer version."""


class Unsupported(TreeringError, TypeError, ValueError):
    """treering cannot store or place this value without changing it, so nothing was done."""


class StoreFailed(TreeringError, OSError):
    """The operating system refused a read or a write; ``errno`` and ``filename`` say which.

    Example:
        >>> import errno
        >>> error = StoreFailed.of(OSError(errno.ENOSPC, "No space left on device"), "a.msgpack", "write")
        >>> error.errno == errno.ENOSPC
        True
        >>> print(error)
        could not write 'a.msgpack': No space left on device
    """

    @classmethod
    def of(cls, cause: OSError, path: str | os.PathLike[str], action: str, *, hint: str | None = None) -> TreeringError:
        """Wrap ``cause``; it stays an instance of the builtin class that ``cause`` has.

        A missing file becomes ``NotFound``; EACCES and EPERM are also ``PermissionError``, EISDIR is also
        ``IsADirectoryError``, ENOTDIR is also ``NotADirectoryError``.
        """
        shown = show_path(os.fspath(path))
        reason = hide_secrets(cause.strerror or str(cause))
        by_errno: dict[int | None, type[TreeringError]] = {
            errno.ENOENT: NotFound,
            errno.EACCES: PermissionDenied,
            errno.EPERM: PermissionDenied,
            errno.EISDIR: IsDirectory,
            errno.ENOTDIR: NotDirectory,
        }
        error = by_errno.get(cause.errno, cls)(f"could not {action} {shown!r}: {reason}", hint=hint)
        if isinstance(error, OSError):
            error.errno, error.filename, error.strerror = cause.errno, shown, reason
        return error


class Exists(TreeringError, FileExistsError):
    """The path exists already; it was not changed."""


class Busy(TreeringError, OSError):
    """Another process is saving to the path. Try again when it is done; nothing was changed."""


class Timeout(TreeringError, TimeoutError):
    """Other processes of the job did not arrive or answer in time. Find out what happened to them.

    Attributes:
        missing: their numbers, if they are known.
    """

    def __init__(self, message: str, *, hint: str | None = None, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message, hint=hint)
        self.missing = missing


class ProcessFailed(TreeringError, RuntimeError):
    """Another process of the job failed, so no process saved or loaded anything.

    Attributes:
        processes: the numbers of the processes that failed.
    """

    processes: tuple[int, ...] = ()


class MissingExtra(TreeringError, ImportError):  # type: ignore[misc]  # path is a key path, never that of a module
    """A package that only some paths need is not installed; the hint has the command."""


class Cancelled(TreeringError):
    """A save in flight was cancelled before its commit, here or on another process. Its path is unchanged."""


class NotShared(StoreFailed):
    """The path is not one folder for all processes of the job. Use a file system that all of them share.

    Attributes:
        processes: the numbers of the processes that do not see what process 0 writes.
    """

    processes: tuple[int, ...] = ()


class PermissionDenied(StoreFailed, PermissionError):
    """EACCES or EPERM."""


class IsDirectory(StoreFailed, IsADirectoryError):
    """EISDIR: a folder where a file is expected."""


class NotDirectory(StoreFailed, NotADirectoryError):
    """ENOTDIR: a file where a folder is expected."""


class StaticFieldsDiffer(UserWarning):
    """Static fields or functions of ``like`` differ from those that were saved; those of ``like`` were taken."""


class KeptOnHost(UserWarning):
    """Arrays that were meant for devices stayed numpy, because jax as configured cannot hold their dtype."""


class LeavesInitialised(UserWarning):
    """``Run.load_or_init`` found a step without some leaves of ``init_fn``'s tree, and initialised those."""


class UnknownMetric(UserWarning):
    """A rule of a run names a metric that no step has, so it keeps all steps."""


class StepsNotSaved(UserWarning):
    """A run ended, and steps that a training loop offered since the last save are not in it."""


class NotSharded(UserWarning):
    """Arrays stay where they are: the sharding tree does not fit them."""


class NotFenced(UserWarning):
    """A late request of an earlier save may undo that of this single file, for nothing in the bucket can refuse it."""


class NotRemoved(UserWarning):
    """Data that nothing needs stay in a bucket, because the credentials may not remove them; reported once."""


class RulesUnmatched(UserWarning):
    """A partition rule matches no key, or only a catch-all matches some leaves; reported once."""
