"""How many examples of a property are drawn: few by default, all where CI asks for them."""

from __future__ import annotations

import os

__all__ = ["drawn"]

_FEW = 6


def drawn(max_examples: int) -> int:
    """Return a tenth of the examples, or all of them where the mark is selected (``-m examples``).

    A run whose variable TREERING_EXAMPLES is a number draws so many of each.
    """
    asked = int(os.environ.get("TREERING_EXAMPLES", "0"))
    if asked or "TREERING_ALL_EXAMPLES" in os.environ:
        return asked or max_examples
    return min(max_examples, max(_FEW, max_examples // 10))
