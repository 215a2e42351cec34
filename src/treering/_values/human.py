"""Numbers as people read them: sizes, counts, rates, durations; and stretches of time as people give them.

Three significant digits and a unit. Sizes count in powers of 1024 (KiB, MiB), as `ls -h` and `du -h` do; rates
count in powers of 1000 (MB/s), as disks are sold; counts of parameters use K, M, B and T.
"""

from __future__ import annotations

import datetime
import functools
import math
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from treering._printable import printable
from treering.errors import MismatchError, UnsupportedError

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_COUNTS = ("", " K", " M", " B", " T")
_RATES = ("B/s", "kB/s", "MB/s", "GB/s", "TB/s")
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_SINGULAR = {"axes": "axis", "boxes": "box", "children": "child", "indices": "index", "leaves": "leaf"}
_SINGULAR |= {"processes": "process", "retries": "retry"}
_SINGULAR |= {"are": "is", "differ": "differs", "follow": "follows", "lie": "lies", "were": "was"}
_TEN, _HUNDRED, _WHOLE = 9.995, 99.95, 999.5
_COMPARED = 2000
_ALL: Final = 12
_FIRST, _LAST = 3, 5


def bytes_text(count: int) -> str:
    """Write a number of bytes.

    Example:
        >>> bytes_text(0), bytes_text(1023), bytes_text(1536), bytes_text(1288490189)
        ('0 B', '1023 B', '1.50 KiB', '1.20 GiB')
    """
    number, step = _scale(count, 1024, len(_SIZES))
    return f"{count} B" if step == 0 else f"{_digits(number)} {_SIZES[step]}"


def count_text(count: int) -> str:
    """Write a number of things, parameters for instance.

    Example:
        >>> count_text(999), count_text(4389632), count_text(117_400_000), count_text(6_740_000_000)
        ('999', '4.39 M', '117 M', '6.74 B')
    """
    number, step = _scale(count, 1000, len(_COUNTS))
    return str(count) if step == 0 else f"{_digits(number)}{_COUNTS[step]}"


def pluralize(count: int, things: str, form: str = "") -> str:
    """Write a number with what it counts, which is given in the plural: a noun, and perhaps its verb.

    Args:
        count: the number.
        things: what it counts.
        form: how the number is formatted, "," for instance.

    Example:
        >>> pluralize(1, "leaves"), pluralize(1, "bytes were"), pluralize(4096, "more rows", ",")
        ('1 leaf', '1 byte was', '4,096 more rows')
    """
    if count == 1:
        things = " ".join(_SINGULAR.get(word, word.removesuffix("s")) for word in things.split(" "))
    return f"{count:{form}} {things}"


def join_first(texts: Sequence[str], most: int) -> str:
    """Join the first texts with commas, and say how many more there are.

    Example:
        >>> join_first(["a", "b"], 2), join_first(["a", "b", "c"], 1)
        ('a, b', 'a and 2 more')
    """
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def shown_names(names: Sequence[str]) -> str:
    """Return the first few names of files, as a sentence shows them."""
    return join_first(list(map(repr, names)), _LAST)


def rate_text(count: int, seconds: float) -> str:
    """Write bytes per second, for ``count`` bytes moved in ``seconds``.

    Example:
        >>> rate_text(52_000_000, 0.1), rate_text(3_300_000_000, 1.0), rate_text(1, 0.0)
        ('520 MB/s', '3.30 GB/s', '-')
    """
    if seconds <= 0:
        return "-"
    number, step = _scale(count / seconds, 1000, len(_RATES))
    return f"{_digits(number)} {_RATES[step]}"


def duration_text(seconds: float) -> str:
    """Write a duration of ``seconds``.

    Example:
        >>> duration_text(0.0000123), duration_text(0.0421), duration_text(12.34), duration_text(754)
        ('12.3 µs', '42.1 ms', '12.3 s', '12 min 34 s')
        >>> duration_text(3 * 3600 + 120), duration_text(2 * 86400 + 3600)
        ('3 h 2 min', '2 d 1 h')
    """
    if seconds < _WHOLE / 1e6:
        return f"{_digits(seconds * 1e6)} µs"
    if seconds < _WHOLE / 1e3:
        return f"{_digits(seconds * 1e3)} ms"
    if seconds < _MINUTE - 0.05:
        return f"{_digits(seconds)} s"
    if (whole := round(seconds)) < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE} s"
    minutes = round(seconds / _MINUTE)
    if minutes * _MINUTE < _DAY:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / _HOUR)
    return f"{hours // 24} d {hours % 24} h"


def _scale(number: float, base: int, steps: int) -> tuple[float, int]:
    """Divide by ``base`` until less than one more unit is left, the rounding of `_digits` counted in."""
    step = 0
    while step < steps - 1 and number >= base - 0.5:
        number /= base
        step += 1
    return number, step


def _digits(number: float) -> str:
    """Write three significant digits, more only where the whole part has more."""
    if number < _TEN:
        return f"{number:.2f}" if number else "0"
    return f"{number:.1f}" if number < _HUNDRED else str(math.floor(number + 0.5))


def near(text: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the name that is most like ``text``, case aside; None when none is. The first 2000 names are compared.

    Args:
        text: what was asked for.
        names: what there is.
        cutoff: how much a name has to be like it, up to 1.

    Example:
        >>> near("parms", ["params", "step"]), near("STEP", ["params", "step"]), near("zzz", ["params"])
        ('params', 'step', None)
    """
    import difflib  # the command line starts sooner without it

    # Of names that differ in case alone the first one counts.
    folded = {name.casefold(): name for name in reversed(list(islice(names, _COMPARED)))}
    close = difflib.get_close_matches(text.casefold(), folded, n=1, cutoff=cutoff)
    return folded[close[0]] if close else None


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


def build_mismatch(message: str, differences: Iterable[str], hint: str | None = None) -> MismatchError:
    """Return the error for several differences, each of which is in its ``differences``.

    Example:
        >>> build_mismatch("the trees differ", ["w: missing"]).differences
        ('w: missing',)
    """
    error = MismatchError(message, hint=hint)
    error.differences = tuple(map(printable, differences))
    return error


_UNITS = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))


def interval_of(given: datetime.timedelta | float, name: str) -> datetime.timedelta:
    """Return a stretch of time that is longer than nothing.

    Args:
        given: what the user gave; a number counts seconds.
        name: of the argument, for the message.

    Raises:
        UnsupportedError: it is no such stretch.

    Example:
        >>> interval_of(90, "interval")
        datetime.timedelta(seconds=90)
    """
    interval = given
    if isinstance(given, int | float) and not isinstance(given, bool):
        try:
            interval = datetime.timedelta(seconds=given)
        except (OverflowError, ValueError):  # more than timedelta holds, or nan
            raise UnsupportedError(f"{name}={given!r} is not a number of seconds") from None
    if not isinstance(interval, datetime.timedelta) or interval <= datetime.timedelta():
        raise UnsupportedError(f"{name} is {given!r:.100}, but must be a timedelta or seconds, more than 0")
    return interval


# A loop hears at each step when the next one is saved.
@functools.lru_cache(maxsize=100)
def interval_text(interval: datetime.timedelta) -> str:
    """Write it as Python does, in the largest unit that gives a whole number.

    Example:
        >>> interval_text(datetime.timedelta(minutes=90)), interval_text(datetime.timedelta(hours=24))
        ('timedelta(minutes=90)', 'timedelta(days=1)')
        >>> interval_text(datetime.timedelta(seconds=1.5))
        'timedelta(seconds=1.5)'
    """
    for name, seconds in _UNITS:
        count, rest = divmod(interval, datetime.timedelta(seconds=seconds))
        if not rest:
            return f"timedelta({name}={count})"
    return f"timedelta(seconds={interval.total_seconds()!r})"


def require_count(given: object, name: str) -> None:
    """Refuse what is no int from 1 on.

    Raises:
        UnsupportedError: it is none.
    """
    if type(given) is not int or given < 1:
        raise UnsupportedError(f"{name} is {given!r:.100}, but must be an int, 1 or more")
