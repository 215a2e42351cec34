"""What differs between a target and a state dict, all of it at once."""

from __future__ import annotations

import difflib
from typing import Any, Final

import jax
import numpy as np

from treering._printable import MOST_LINES, kind_of, listed, printable
from treering._tree.registry import has_shape_and_dtype, is_typed_key
from treering._tree.state_dict import to_state_dict
from treering._values.human import counted
from treering._values.trail import Trail, unwound
from treering.errors import Mismatch

_LONGEST_NAME: Final = 400
_COMPARED: Final = 1000  # names that are compared for likeness, which takes time with the square
_PYTHON_LEAVES: Final = (bool, int, float, complex, str, bytes)


def require_match(target: Any, state: Any) -> None:
    """Raise where ``state`` would change structure, shape or dtype of ``target``.

    Raises:
        Mismatch: with ``differences``, one line for each.

    Example:
        >>> import numpy as np
        >>> require_match({"w": np.zeros(2)}, {"w": np.zeros(3), "b": 1})
        Traceback (most recent call last):
            ...
        treering.errors.Mismatch: 2 differences between the target and the data:
          b: unexpected, the data has int
          w: wanted float64[2], found float64[3]
    """
    found = differences(target, state) if target is not None else []
    if not found:
        return
    count = counted(len(found), "differences")
    error = Mismatch(f"{count} between the target and the data:{listed(found)}")
    error.differences = tuple(map(printable, found))
    raise error


def differences(target: Any, state: Any) -> list[str]:
    """Return one line for each difference in structure, shape or dtype, sorted by key path."""
    unlike: dict[tuple[str, ...], str] = {}
    missing: dict[tuple[str, ...], str] = {}
    unexpected: dict[tuple[str, ...], str] = {}
    pending: list[tuple[Trail, Any, Any]] = [(None, to_state_dict(target), state)]
    while pending:
        trail, wanted, found = pending.pop()
        if not (isinstance(wanted, dict) and isinstance(found, dict)):
            wanted_text, found_text = _described(wanted), _described(found)
            if wanted_text != found_text:
                unlike[unwound(trail)] = f"wanted {wanted_text}, found {found_text}"
            continue
        found = _modern_names(wanted, found)
        for key in wanted.keys() - found.keys():
            missing[unwound((trail, str(key)))] = _described(wanted[key])
        for key in found.keys() - wanted.keys():
            unexpected[unwound((trail, str(key)))] = _described(found[key])
        pending.extend(((trail, str(key)), wanted[key], found[key]) for key in wanted.keys() & found.keys())
    lines = unlike | {path: f"unexpected, the data has {kind}" for path, kind in unexpected.items()}
    for number, (path, kind) in enumerate(sorted(missing.items())):
        near = _near(path, kind, unexpected) if number < MOST_LINES else ""
        lines[path] = f"missing, the target has {kind}{near}"
    return [f"{_printable('/'.join(path)) or '.'}: {lines[path]}" for path in sorted(lines)]


def _modern_names(wanted: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """See a namedtuple in flax's form from before 2022 as today's."""
    if set(found) == {"name", "fields", "values"} != set(wanted):
        fields, values = found["fields"], found["values"]
        if isinstance(fields, dict) and isinstance(values, dict) and fields.keys() == values.keys():
            return {str(fields[index]): values[index] for index in fields}
    return found


def _near(path: tuple[str, ...], kind: str, unexpected: dict[tuple[str, ...], str]) -> str:
    """Suggest what a missing leaf may be called in the data: the most alike name of the same shape and dtype."""
    others = ["/".join(other) for other, other_kind in unexpected.items() if other_kind == kind]
    if len(others) > _COMPARED:
        return ""
    close = difflib.get_close_matches("/".join(path), others, n=1, cutoff=0.5)
    return f" (is it {_printable(close[0])!r} in the data?)" if close else ""


def _printable(name: str) -> str:
    """Cut a name from a file to a length for people, and escape what could move a cursor."""
    name = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
    return printable(name)


def _described(leaf: Any) -> str:
    """Return what must agree: dtype and shape of an array, the type of a Python leaf."""
    if isinstance(leaf, dict):
        return f"a branch of {len(leaf)}"
    if is_typed_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
        return f"{data.dtype.name}{list(data.shape)}"
    if has_shape_and_dtype(leaf):
        return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
    if leaf is None:
        return "None"
    if isinstance(leaf, bytearray | memoryview):
        return "bytes"
    for kind in _PYTHON_LEAVES:
        if type(leaf) is kind:
            return kind.__name__
    return f"{kind_of(leaf)}"
