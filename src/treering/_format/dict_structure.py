"""A structure as nested dicts with text keys, the form in which eformer gives trees back."""

from __future__ import annotations

from collections.abc import Iterable

from treering._format.index import Container, Token
from treering._format.key_text import key_text


def as_dicts(structure: Iterable[Token]) -> list[Token]:
    """Return the same structure with a dict in place of every container; its keys are the parts of the key texts.

    Example:
        >>> as_dicts([Container(node="list", keys=(0, 1)), 2])[0].keys
        ('0', '1')
    """
    return [
        Container(node="dict", keys=tuple(map(key_text, token.keys))) if isinstance(token, Container) else token
        for token in structure
    ]
