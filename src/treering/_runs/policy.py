"""The text of a rule that says which steps stay, as ``run.json`` and the command line have it -> the rule.

The text is Python's, but nothing is evaluated: what is not the name of a rule, a number or a text is refused.
"""

from __future__ import annotations

import ast
import datetime
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

from treering.errors import Format, TreeringError
from treering.retention import KeepBest, KeepEvery, KeepLast, KeepSteps, Policy

_RULES: Final[Mapping[str, Callable[..., Policy]]] = {
    "KeepBest": KeepBest,
    "KeepEvery": KeepEvery,
    "KeepLast": KeepLast,
    "KeepSteps": KeepSteps,
}
_LONGEST: Final = 10_000
_HINT: Final = (
    "rules are KeepLast(3), KeepEvery(steps=1000), KeepEvery(interval=3600), KeepBest('loss'), KeepSteps(100)"
)


def policy_of(text: str) -> Policy:
    """Read a rule, or several that are joined with ``|``.

    Raises:
        Format: it is none, or one that this version does not know.

    Example:
        >>> policy_of("KeepLast(3) | KeepBest('loss', mode='max')")
        KeepLast(3) | KeepBest('loss', mode='max')
        >>> policy_of("KeepEvery(interval=timedelta(hours=1))")
        KeepEvery(interval=timedelta(hours=1))
    """
    try:
        if len(text) > _LONGEST:
            raise SyntaxError  # noqa: TRY301 - said as one error below
        parsed = ast.parse(text.strip(), mode="eval").body
        rules = []
        while isinstance(parsed, ast.BinOp) and isinstance(parsed.op, ast.BitOr):
            rules.append(_rule(parsed.right))
            parsed = parsed.left
        rules.append(_rule(parsed))
        return functools.reduce(operator.or_, reversed(rules))
    except TreeringError as error:
        raise Format(f"{text!r:.200} is no rule: {error.message}", hint=error.hint or _HINT) from error
    except (SyntaxError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise Format(f"{text!r:.200} is no rule that this version knows", hint=_HINT) from error


def _rule(node: ast.expr) -> Policy:
    match node:
        case ast.Call(func=ast.Name(id=name), args=places, keywords=named) if name in _RULES:
            return _RULES[name](*map(_value, places), **_named(named))
    raise SyntaxError


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() | str() as value):
            return value
        case ast.Call(func=ast.Name(id="timedelta"), args=[], keywords=named):
            return datetime.timedelta(**_named(named))
    raise SyntaxError


def _named(keywords: list[ast.keyword]) -> dict[str, Any]:
    # Without a name it is ** of something, which no rule's text has.
    return {str(keyword.arg): _value(keyword.value) for keyword in keywords}
