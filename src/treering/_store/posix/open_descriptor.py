"""A descriptor that an interrupt cannot lose.

Python handles signals between two instructions, never inside a call of C. In ``number = os.open(path)`` the call and
the assignment are two instructions, and an interrupt between them loses the number. Here one call of C opens and
records, and one call of C forgets and closes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterable
from typing import Any, Self

from treering._store.posix import descriptors


class OpenDescriptor:
    """What ``opener(*arguments)`` opens, a context manager. A dropped one closes itself.

    Raises:
        OSError: the system refused.

    Example:
        >>> import tempfile
        >>> with OpenDescriptor(os.open, tempfile.mkdtemp(), os.O_RDONLY) as opened:
        ...     opened.number >= 0
        True
        >>> opened.number
        -1
    """

    # ``__del__`` is an attribute of the instance, a function of C: an interrupt inside a method would be lost.
    __slots__ = ("__del__", "_close", "_lockable", "_numbers")

    def __init__(self, opener: Callable[..., int] | None = None, *arguments: Any) -> None:
        self._lockable = False
        self._numbers = numbers = [-1]
        # ``pop`` gives each number once, then the -1 that ends the iterator. ``any`` goes on, as ``close`` gives None.
        self.__del__ = self._close = functools.partial(any, map(os.close, iter(numbers.pop, -1)))
        if opener is not None:
            numbers.extend(itertools.starmap(opener, (arguments,)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            if self._lockable:
                self.unlock()
            self._close_each()
            return
        with contextlib.suppress(OSError):  # the error that brought us here says more
            self.close()

    @property
    def number(self) -> int:
        """The descriptor, of several the first; -1 when it is closed."""
        first = self._numbers[1:2]
        return first[0] if first else -1

    def open(self, opener: Callable[..., int], *arguments: Any) -> None:
        """Open what was made without an opener; once."""
        self._numbers.extend(itertools.starmap(opener, (arguments,)))

    def open_each(self, opener: Callable[..., int], *columns: Iterable[Any]) -> list[int]:
        """Open what each row of arguments says, and return those descriptors; they are closed with this one."""
        known = len(self._numbers)
        self._numbers.extend(map(opener, *columns))
        return self._numbers[known:]

    def lock(self) -> bool | None:
        """Take its lock without waiting, as `descriptors.lock`; closing gives it back."""
        self._lockable = True
        return descriptors.lock(self.number)

    def unlock(self) -> None:
        """Give its lock back at once, also where a child that was forked meanwhile holds the file open."""
        if self._lockable and (number := self.number) >= 0:
            descriptors.unlock(number)

    def close(self) -> None:
        """Give its lock back and close it. May be called twice.

        Raises:
            OSError: the system refused to close it.
        """
        self.unlock()
        self._close_each()

    def _close_each(self) -> None:
        try:
            self._close()
        except OSError:
            while self._numbers:  # one that could not be closed well keeps no other open
                with contextlib.suppress(OSError):
                    self._close()
            raise


def open_folder(folder: str) -> OpenDescriptor | None:
    """Open ``folder`` so that it can be synced; None where the platform cannot open folders."""
    return None if os.name == "nt" else OpenDescriptor(os.open, folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
