"""The name that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import islice

_COMPARED = 2000


def near(text: str, names: Iterable[str]) -> str | None:
    """Return the name that is most like ``text``, case aside; None when none is. The first 2000 names are compared.

    Example:
        >>> near("parms", ["params", "step"]), near("STEP", ["params", "step"]), near("zzz", ["params"])
        ('params', 'step', None)
    """
    # Of names that differ in case alone the first one counts.
    folded: dict[str, str] = {}
    for name in islice(names, _COMPARED):
        folded.setdefault(name.casefold(), name)
    close = difflib.get_close_matches(text.casefold(), folded, n=1)
    return folded[close[0]] if close else None
