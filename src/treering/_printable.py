"""Text that others chose, made safe to print: it must not move the cursor, hide itself or turn the line around."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_QUOTED: Final = re.compile(  # a query may have spaces and quotes, escaped by `repr`; it ends with the text
    r"""(['"])([a-z][a-z0-9+.-]*:/{1,2}[^\s'"?]*\?)(?:\\.|(?!\1).)+\1""", re.IGNORECASE | re.DOTALL
)
_QUERY: Final = re.compile(r"""([a-z][a-z0-9+.-]*:/{1,2}[^\s'"?]*\?)[^\s'"]+""", re.IGNORECASE)
_WHOLE: Final = re.compile(r"([a-z][a-z0-9+.-]*:/{1,2}[^?]*\?).+", re.IGNORECASE | re.DOTALL)
_MEMBER: Final = re.compile(  # where no query begins: in a fragment, a parameter, or after a mark that was escaped
    r"""((?:%3f|[#;&])[\w.-]{0,40}?(?:sig|token|secret|password|credential)[\w.-]{0,40}=)[^\s'"]+""", re.IGNORECASE
)
_LOGIN: Final = re.compile(  # abfss://CONTAINER@ACCOUNT is none
    r"""(?<![a-z0-9+.-])((?!(?:abfs|wasb)s?:)[a-z][a-z0-9+.-]*:/{1,2}|[a-z][a-z0-9+.-]*:/{1,2}(?=[^\s/'"@:]*:))[^\s/'"]*@""",
    re.IGNORECASE,
)

MOST_LINES = 20
"""A message shows as many lines of a list."""
LONGEST_LINE = 1000
"""A name or a line of a list is shown with as many characters: names may be those of a hostile file."""
_LONGEST_PARAGRAPH = 8192
_LONG_NAME: Final = re.compile(rf"""[^\s/'"]{{{LONGEST_LINE + 1},}}""")


def printable(text: str, *, lines: bool = False) -> str:
    r"""Escape whatever does not show as itself; every text that treering shows of files and programs goes through here.

    Control characters, line breaks, bidirectional overrides, invisible format characters, lone surrogates and
    unassigned code points come out as ``\x1b`` or ``\u202e``. Accents that stand on nothing are kept.

    Args:
        text: any text.
        lines: whether line feeds stay, as in messages of several lines.

    Example:
        >>> print(printable("red\x1b[31m, \u202eright to left\n"))
        red\x1b[31m, \u202eright to left\n
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or (lines and each == "\n") else each.encode("unicode_escape").decode("ascii")
        for each in text
    )


def hide_secrets(text: str) -> str:
    """Return a text without the queries and logins of its URLs: those let each reader of a log in.

    Example:
        >>> hide_secrets("could not read 'https://host/a.safetensors?X-Amz-Signature=1f' at http://me:key@host")
        "could not read 'https://host/a.safetensors?...' at http://...@host"
    """
    text = _QUERY.sub(r"\1...", _QUOTED.sub(r"\1\2...\1", text)) if "?" in text else text
    text = _MEMBER.sub(r"\1...", text) if ":/" in text else text
    return _LOGIN.sub(r"\1...@", text) if "@" in text else text


def show_path(path: str) -> str:
    r"""Return a path, or a URL without what lets others in, whatever stands in its query.

    Example:
        >>> show_path("memory://a?sig=\n1f"), show_path("runs/a?b")
        ('memory://a?...', 'runs/a?b')
    """
    return hide_secrets(found[1] + "..." if (found := _WHOLE.fullmatch(path)) else path)


def shorten(text: str, most: int) -> str:
    """Return a text, or its first characters where it has more than ``most``.

    Example:
        >>> shorten("kernel", 6), shorten("kernel", 3)
        ('kernel', 'ker...')
    """
    return text if len(text) <= most else f"{text[:most]}..."


def cut_middle(text: str, most: int) -> str:
    """Return a text, of one with more than ``most`` characters its beginning and its end.

    Example:
        >>> cut_middle("kernel", 6), cut_middle("k" * 1000, 4)
        ('kernel', 'kk[997 characters left out]k')
    """
    start, end = most // 2, most // 4
    left_out = f"[{len(text) - start - end} characters left out]"
    return text if len(text) <= most else f"{text[:start]}{left_out}{text[-end:]}"


def cut_names(text: str) -> str:
    """Return a message, of long names in it and of each long line the beginning and the end; no path is so long.

    Example:
        >>> cut_names(f"there is no leaf {'k' * 40_000!r}").replace("k" * 250, "K")
        "there is no leaf 'KK[39250 characters left out]K'"
    """
    shown = _LONG_NAME.sub(lambda name: cut_middle(name[0], LONGEST_LINE), text)
    return "\n".join(cut_middle(line, _LONGEST_PARAGRAPH) for line in shown.split("\n"))


def kind_of(x: object) -> str:
    """Return the name of a value's type with its article, for a message.

    Example:
        >>> kind_of(7), kind_of({}), kind_of(None)
        ('an int', 'a dict', 'None')
    """
    name = type(x).__name__
    return "None" if x is None else f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"


def way_to_save(x: object, usual: str) -> str:
    """Return the hint for an object that no file can hold; ``ConfigDict`` of ml_collections is one that says it itself.

    Example:
        >>> way_to_save({1}, "make it a list")
        'make it a list'
    """
    return "save x.to_dict()" if hasattr(x, "to_dict") else usual


def way_to_pack(x: object) -> str:
    """Return the hint for an object that msgpack cannot hold: a folder keeps what is no more than its class or code.

    Equinox has such ones in the place of weights that layers share.

    Example:
        >>> way_to_pack({1})
        'register its type (register_serialization_state) or make it a pytree node'
    """
    if callable(x) or getattr(x, "__dict__", None) == {}:
        return "treering.save keeps it in a folder; elsewhere omit it, as eqx.filter(tree, eqx.is_array) does"
    return way_to_save(x, "register its type (register_serialization_state) or make it a pytree node")


def list_lines(lines: Sequence[str]) -> str:
    r"""Return lines below each other for a message, each `printable`; of many the first, and how many more there are.

    Example:
        >>> print("found:" + list_lines(["a", "b\nc"]))
        found:
          a
          b\nc
    """
    more = [f"... and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    return "".join(f"\n  {printable(cut_middle(line, LONGEST_LINE))}" for line in [*lines[:MOST_LINES], *more])
