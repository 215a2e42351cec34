"""Patterns over key texts, with captures: the same pattern finds keys, and writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from treering.errors import Unsupported

_PIECE: Final = re.compile(r"(\{\{|\}\})|\{([A-Za-z][A-Za-z0-9_]*)(\*{0,2})\}|[{}]")
_CLASSES: Final = {"": "[^/.]", "*": "[^/]", "**": "."}
_MOST_CAPTURES: Final = 16


class KeyPattern:
    """A key text in which ``{name}`` stands for some characters, and ``{{`` and ``}}`` for braces.

    ``{name}`` is one or more characters other than ``/`` and ``.``, ``{name*}`` other than ``/``, and ``{name**}`` is
    any of them. A capture ends at the first place where the text stands that follows it in the pattern, and the last
    one of a pattern where all of the rest fits. So a match costs time in proportion to the key.

    Args:
        text: the pattern.

    Attributes:
        text: the same.
        captures: the names in it.

    Raises:
        Unsupported: it is not such a text.

    Example:
        >>> pattern = KeyPattern("model.layers.{i}.{name}_proj.weight")
        >>> pattern.match("model.layers.7.q_proj.weight")
        {'i': '7', 'name': 'q'}
        >>> pattern.match("model.norm.weight") is None
        True
        >>> KeyPattern("layers/{name}/kernel").render({"i": "7", "name": "q"})
        'layers/q/kernel'
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise Unsupported(f"a pattern is a text, found {text!r:.100}")
        self.text = text
        self._pieces: list[tuple[str, str, str]] = []
        """Each capture, its class, and the text behind it; the first of them is the text before all captures."""
        name, kind, literal, start = "", "", "", 0
        for found in _PIECE.finditer(text):
            literal += text[start : found.start()]
            start = found.end()
            if found[1]:
                literal += found[1][0]
            elif found[2]:
                if not literal and name:
                    raise Unsupported(f"nothing lies between {{{name}}} and {found[0]} in the pattern {text!r:.200}")
                self._pieces.append((name, kind, literal))
                name, kind, literal = found[2], found[3], ""
            else:
                raise Unsupported(f"a brace stands alone in the pattern {text!r:.200}", hint="write '{{' for '{'")
        self._pieces.append((name, kind, literal + text[start:]))
        names = [piece[0] for piece in self._pieces[1:]]
        if len(set(names)) < len(names) or len(names) > _MOST_CAPTURES:
            raise Unsupported(f"the pattern {text!r:.200} has a capture twice, or more than {_MOST_CAPTURES}")
        self.captures = frozenset(names)
        # Atomic groups: what was found is not tried again in another way.
        *middle, last = [f"(?P<{n}>{_CLASSES[k]}+?){re.escape(t)}" for n, k, t in self._pieces[1:]] or [""]
        groups = "".join(f"(?>{group})" for group in middle)
        self._regex = re.compile(rf"{re.escape(self._pieces[0][2])}{groups}(?>{last}\Z)", re.DOTALL)

    def match(self, key: str) -> dict[str, str] | None:
        """Return what each capture stands for in a key; None where the key does not fit."""
        found = self._regex.match(key)
        return None if found is None else found.groupdict()

    def render(self, captures: Mapping[str, str]) -> str:
        """Return the key in which the captures are these texts."""
        return "".join((captures[name] if name else "") + literal for name, _, literal in self._pieces)
