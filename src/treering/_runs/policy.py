"""The rules of a run that say which steps stay: read from their text, and held against the metrics that there are.

The text is Python's, but nothing is evaluated: what is not the name of a rule, a number or a text is refused.
"""

from __future__ import annotations

import ast
import datetime
import functools
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from treering._runs.steps import Records
from treering._values.human import near
from treering.errors import Format, TreeringError
from treering.retention import AnyRule, KeepBest, KeepEvery, KeepLast, KeepSteps, Policy

_RULES: Final[Mapping[str, Callable[..., Policy]]] = {
    rule.__name__: rule for rule in (KeepBest, KeepEvery, KeepLast, KeepSteps)
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
        raise Format(f"{text!r:.200} is not a rule: {error.message}", hint=error.hint or _HINT) from error
    except (SyntaxError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise Format(f"{text!r:.200} is not a rule that this version knows", hint=_HINT) from error


def own_rules(records: Records) -> Policy | None:
    """Return the rules that a run noted; None where it keeps all.

    Raises:
        Format: this version does not know them.
    """
    return None if records.keep is None else policy_of(records.keep)


def unknown_metrics(rules: Policy | None, records: Records) -> dict[str, str | None]:
    """Return the metrics that rules go by and no step has, each with the name that was probably meant.

    Without steps nothing is known, and nothing is returned.

    Example:
        >>> unknown_metrics(KeepBest("los"), Records(keep=None, save_every=None, steps=(), unreadable={}))
        {}
    """
    names = {name for record in records.steps for name in record.metrics}
    return find_unmeasured(rules, names) if records.steps else {}


def find_unmeasured(rules: Policy | None, there: Collection[str]) -> dict[str, str | None]:
    """Return the metrics that rules go by and that are not there, each with the name that was probably meant.

    Example:
        >>> find_unmeasured(KeepBest("los"), ["loss"])
        {'los': 'loss'}
    """
    parts = rules.rules if isinstance(rules, AnyRule) else (rules,)
    wanted = [rule.metric for rule in parts if isinstance(rule, KeepBest) and rule.metric not in there]
    return {metric: near(metric, there) for metric in wanted}


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
