"""What a step is called, and what is noted with it: its number, the metrics and the metadata that the user gives."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import jax
import numpy as np

from treering._format.run_document import StepNote, add_note
from treering._printable import kind_of
from treering._values.checkpoint_names import HIGHEST_STEP
from treering.errors import UnsupportedError

_Given: TypeAlias = Mapping[str, Any] | None
_NUMBERS: Final = (int, float, np.generic, np.ndarray, jax.Array)
# Of numpy: truth values, ints, floats; V: those of ml_dtypes, bfloat16 for instance.
_KINDS: Final = "biufV"


def require_step_number(step: Any) -> int:
    """Return a step as an int; numpy's and jax's are taken too.

    Raises:
        UnsupportedError: it is no number of a step.

    Example:
        >>> require_step_number(np.int32(7))
        7
    """
    hint = "steps are ints from 0 to 2**63 - 1"
    try:
        number = operator.index(step)
    except TypeError:
        if not isinstance(step, str | float | None):
            hint = "the step is the first argument: run.save(step, tree), run.load(step, like=tree)"
            raise UnsupportedError(f"{kind_of(step)} is not a step", hint=hint) from None
        number = -1
    if isinstance(step, bool | np.bool_) or not 0 <= number <= HIGHEST_STEP:
        raise UnsupportedError(f"{step!r:.100} is not a step", hint=hint)
    return number


def step_metadata(
    step: int, saved: float, *, metrics: _Given, metadata: _Given, temporary: bool, mark: str | None = None
) -> dict[str, Any]:
    """Return the metadata of a step's checkpoint: the user's, and the run's own note.

    Args:
        step: its number.
        saved: when it is saved, in POSIX seconds.
        metrics: the user's numbers, by name.
        metadata: the user's JSON.
        temporary: whether it goes when a newer step is committed.
        mark: that of the list of the steps which it leaves behind, if it does.

    Raises:
        UnsupportedError: something is of another type, or cannot be noted.

    Example:
        >>> noted = step_metadata(7, 0.0, metrics={"loss": np.float32(0.5)}, metadata=None, temporary=False)
        >>> noted["treering"]["metrics"]
        {'loss': 0.5}
    """
    if not isinstance(metadata, Mapping | None):
        raise UnsupportedError(f"metadata is {kind_of(metadata)}, not a dict of JSON")
    note = StepNote(step=step, saved=saved, metrics=_numbers(metrics), temporary=temporary, mark=mark)
    return add_note(metadata or {}, note)


def _numbers(metrics: _Given) -> dict[str, float]:
    if not isinstance(metrics, Mapping | None):
        raise UnsupportedError(f"metrics is {kind_of(metrics)}, not a dict of numbers")
    given: Mapping[Any, Any] = metrics or {}
    for name in given:
        if not isinstance(name, str) or not name:
            raise UnsupportedError(f"the metric {name!r:.100} has no name: names are str")
    return {name: _number(name, value) for name, value in given.items()}


def _number(name: str, value: Any) -> float:
    kind = value.dtype.kind if isinstance(value, np.generic | np.ndarray | jax.Array) else "f"
    if isinstance(value, _NUMBERS) and np.ndim(value) == 0 and kind in _KINDS:
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise UnsupportedError(f"the metric {name!r:.100} is {value!r:.100}, which is not a number") from error
    hint = "metrics are numbers: int, float, or an array without axes"
    raise UnsupportedError(f"the metric {name!r:.100} is {value!r:.100}", hint=hint)
