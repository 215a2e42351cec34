"""Steps of a run, as people read a few of them or many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_ALL: Final = 12
_FIRST, _LAST = 3, 5


def steps_text(steps: Sequence[int]) -> str:
    """Return steps for people; of many the first and the last ones, and how many they are.

    Args:
        steps: their numbers, ascending; one at least.

    Example:
        >>> steps_text([10]), steps_text([10, 20]), steps_text([10, 20, 30])
        ('step 10', 'steps 10 and 20', 'steps 10, 20 and 30')
        >>> steps_text(range(0, 5000, 10))
        'steps 0, 10, 20, ..., 4950, 4960, 4970, 4980 and 4990 (500 in all)'
    """
    if len(steps) == 1:
        return f"step {steps[0]}"
    texts = [str(step) for step in (steps if len(steps) <= _ALL else (*steps[:_FIRST], *steps[-_LAST:]))]
    if len(steps) > _ALL:
        texts.insert(_FIRST, "...")
    in_all = f" ({len(steps)} in all)" if len(steps) > _ALL else ""
    return f"steps {', '.join(texts[:-1])} and {texts[-1]}{in_all}"
