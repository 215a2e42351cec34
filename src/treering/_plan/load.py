"""Who reads which bytes of a stored leaf."""

from __future__ import annotations

from treering._plan.blocks import covering_ranges

__all__ = ["covering_ranges"]
