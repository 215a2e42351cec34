"""Names of options that an earlier version had: a call that uses one is told the new one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def moved_options(**instead: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a call with an option of an earlier version raise a TypeError that says what to write instead.

    Args:
        instead: for each old option, what to do now.

    Example:
        >>> @moved_options(rename="pass key_map=")
        ... def load(path): return path
        >>> load("a", rename={})
        Traceback (most recent call last):
            ...
        TypeError: load() has no option 'rename': pass key_map=
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> T:
            if moved := options.keys() & instead.keys():
                name = min(moved)
                raise TypeError(f"{function.__name__}() has no option {name!r}: {instead[name]}")
            return function(*args, **options)

        return call

    return decorate
