"""Calls that fail and calls that are watched: what a test does to one function of a module or a class."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest


def fail(
    patch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    error: int | BaseException,
    *,
    when: Callable[..., object] | None = None,
    done: bool = False,
) -> None:
    """Let a function raise an error, or an ``OSError`` of that number.

    Args:
        patch: undoes it.
        owner: the module or class of the function.
        name: its name.
        error: what is raised.
        when: says of the arguments of a call whether it fails; others do what they should. None: all fail.
        done: whether a call that fails has done its work before.
    """
    real = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        fails = when is None or when(*arguments, **options)
        answer = None if fails and not done else real(*arguments, **options)
        if fails:
            raise OSError(error, os.strerror(error)) if isinstance(error, int) else error
        return answer

    patch.setattr(owner, name, call)


def before(patch: pytest.MonkeyPatch, owner: Any, name: str, act: Callable[..., object]) -> None:
    """Let something be done, with the same arguments, before each call of a function."""
    real = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        act(*arguments, **options)
        return real(*arguments, **options)

    patch.setattr(owner, name, call)


def after(patch: pytest.MonkeyPatch, owner: Any, name: str, act: Callable[..., object]) -> None:
    """Let something be done, with what a function returned and its arguments, after each call of it."""
    real = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        answer = real(*arguments, **options)
        act(answer, *arguments, **options)
        return answer

    patch.setattr(owner, name, call)


def answer(patch: pytest.MonkeyPatch, owner: Any, name: str, value: Any) -> None:
    """Let a function do nothing and return a value, whatever it is given."""
    patch.setattr(owner, name, lambda *_, **__: value)
