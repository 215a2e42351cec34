"""Rules of a key map in a TOML file."""

from __future__ import annotations

import os
import re
import tomllib
from typing import Any, Final

from treering._keymap.key_rule import MOST_RULES, KeyRule
from treering._store.resolve import open_file
from treering._values.human import near
from treering.errors import Format, Unsupported

_LARGEST_FILE: Final = 1 << 20
# Texts and comments, also those that do not end; and a key of more parts than any rule needs, since tomllib takes
# memory and time by the square of their number.
_ASIDE: Final = re.compile(
    r'''"""(?:[^\\]|\\.)*?(?:"""|\\?\Z)|'{3}.*?(?:'{3}|\Z)|"(?:[^"\\\n]|\\[^\n])*+"?|'[^'\n]*+'?|#[^\n]*+''', re.DOTALL
)
_LONG_KEY: Final = re.compile(r"(?:\.[ \t]*+[\w-]++[ \t]*+){8}")
_HEAD: Final = re.compile(r"^[ \t]*\[\[[ \t]*rule[ \t]*\]\]", re.MULTILINE)
_OPTIONS: Final = (
    "stack", "unstack", "unflatten", "transpose", "flatten", "merge", "split", "sizes", "cast", "copy", "rest",
)  # fmt: skip
_NAMES: Final = {"from": "source", "to": "target", "drop": "drop"} | {name: name for name in _OPTIONS}


def read_rules(path: str | os.PathLike[str]) -> list[KeyRule]:
    """Return the rules of a file.

    Raises:
        NotFound, StoreFailed: it is not there, or cannot be read.
        Format: it is not such a file.
    """
    with open_file(path) as file:
        if file.size > _LARGEST_FILE:
            raise Format(f"{os.fspath(path)!r} is too large for a key map, which has at most {_LARGEST_FILE} bytes")
        data = file.read(0, file.size)
    try:
        return parse_rules(data)
    except Format as error:
        raise Format(f"{os.fspath(path)!r} is not a key map: {error}") from error


def parse_rules(data: bytes) -> list[KeyRule]:
    r"""Return the rules of a document.

    Raises:
        Format: it is not TOML, or a rule is wrong; the error names the rule and its line.

    Example:
        >>> parse_rules(b'[[rule]]\nfrom = "wte.weight"\nto = "embed"\n')
        [KeyRule('wte.weight', 'embed')]
    """
    try:
        text = data.decode()
        has_long_key = _LONG_KEY.search(_ASIDE.sub("_", text)) is not None
        document = {} if has_long_key else tomllib.loads(text)
    except ValueError as error:  # also a number of more digits than Python reads
        raise Format(f"it is not TOML: {error}") from error
    except RecursionError:
        raise Format("it is not TOML that a key map needs: it is nested too deep") from None
    if has_long_key:
        raise Format("it has a key of more parts than any rule needs")
    rules = document.get("rule")
    if document.keys() != {"rule"} or not isinstance(rules, list) or not 0 < len(rules) <= MOST_RULES:
        raise Format(f"it has the members {sorted(document)!r:.200}", hint="it is made of [[rule]] tables alone")
    heads = [text.count("\n", 0, found.start()) + 1 for found in _HEAD.finditer(text)]
    lines = heads if len(heads) == len(rules) else [0] * len(rules)
    return [_read_rule(rule, number, line) for number, (rule, line) in enumerate(zip(rules, lines, strict=True), 1)]


def _read_rule(rule: Any, number: int, line: int) -> KeyRule:
    place = f"rule {number}, line {line}" if line else f"rule {number}"
    if not isinstance(rule, dict):
        raise Format(f"{place}: it is not a table")
    for name in rule:
        if name not in _NAMES:
            close = near(name, _NAMES)
            raise Format(f"{place}: unknown member {name!r:.100}{f'; did you mean {close!r}?' if close else ''}")
    given = {_NAMES[name]: value for name, value in rule.items()}
    drop = given.pop("drop", False)
    if "source" not in given or drop not in (True, False) or drop == ("target" in given):
        raise Format(f"{place}: it needs `from`, and either `to` or `drop = true`")
    try:
        return KeyRule(given.pop("source"), given.pop("target", None), **given, place=place)
    except Unsupported as error:
        raise Format(str(error)) from error
