"""The text of one key of a container: the same in every version of Python, and derivable in any language."""

from __future__ import annotations

from typing import Any

from treering._format.index import ForeignKey


def key_text(key: Any) -> str:
    r"""Return the text of a key: a str is its own text, everything else is written in ASCII.

    What Python's ``repr`` shows of other characters depends on its version; so nothing here asks it.

    Example:
        >>> key_text("é"), key_text(5), key_text(b"k"), key_text(("é", 2.5, (None,)))
        ('é', '5', "b'k'", "('\\xe9', 2.5, (None,))")
    """
    kind = type(key)
    if kind is str:
        return key  # type: ignore[no-any-return]
    if kind is tuple:
        items = ", ".join(ascii(item) if type(item) is str else key_text(item) for item in key)
        return f"({items},)" if len(key) == 1 else f"({items})"
    if kind is bytes:
        return ascii(key)
    # Numbers, True, False and None are ASCII.
    return key.text if kind is ForeignKey else str(key)
