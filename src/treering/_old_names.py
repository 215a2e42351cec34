"""Names of an earlier version, and options that no signature says: moved, reserved, and shared by functions."""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def moved_names(module: str, /, **homes: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module that leads from names of an earlier version to where they are now.

    Args:
        module: the full name of the module.
        homes: for each name, the public module of treering that has it now.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        now = f"treering.{homes[name]}"
        warnings.warn(f"{module}.{name} is {now}.{name} now", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(now), name)

    return find


def moved_options(
    shared: type | None = None, defaults: Mapping[str, Any] = MappingProxyType({}), /, **instead: str
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a call with an option of an earlier version raise a TypeError that says what to write instead.

    Args:
        shared: a ``TypedDict`` of the options that the function takes as ``**options``; its signature shows them, and
            others are refused.
        defaults: of those options whose default is not None.
        instead: for each old or reserved option, what to do now.

    Example:
        >>> @moved_options(rename="pass key_map=")
        ... def load(path): return path
        >>> load("a", rename={})
        Traceback (most recent call last):
            ...
        TypeError: load() has no option 'rename': pass key_map=
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = None if shared is None else _with_options(function, shared.__annotations__, defaults)

        @functools.wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> T:
            if moved := options.keys() & instead.keys():
                name = min(moved)
                raise TypeError(f"{function.__name__}() has no option {name!r}: {instead[name]}")
            if signature is not None and (unknown := options.keys() - signature.parameters.keys()):
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument {min(unknown)!r}")
            return function(*args, **options)

        if signature is not None:
            vars(call)["__signature__"] = signature
        return call

    return decorate


def _with_options(
    function: Callable[..., Any], options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> inspect.Signature:
    """Return the signature of a function with an option for each name in place of ``**options``."""
    signature = inspect.signature(function)
    named = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    named += [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(name),
            annotation=getattr(kind, "__forward_arg__", kind),  # a TypedDict wraps what is written as text
        )
        for name, kind in options.items()
    ]
    return signature.replace(parameters=named)
