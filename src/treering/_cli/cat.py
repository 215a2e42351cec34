"""``treering cat``: one leaf, or a part of an array, printed or as a .npy file.

The part is ``KEY[2:10, -1]``, read by hand and never evaluated.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import math
import re
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from treering._cli.main import GOOD, note, write_lines
from treering._cli.verbs import JSON, PATH, read_latest, verb
from treering._format.index import OpaqueLeaf
from treering._format.listing import LeafRecord
from treering._inspect.inspect import ArrayView, OpenTree, open_leaf_by_leaf
from treering._values.human import pluralize
from treering._values.keys import quoted_key
from treering._view.plain import json_text, visible
from treering._view.rows import format_value, has_json, leaves_of, nodes_of, record_of
from treering.errors import FormatError, NotFoundError, UnsupportedError

if TYPE_CHECKING:
    from numpy.typing import NDArray


_LONGEST_TEXT = 10_000
_NO_TYPES = {"none": "None", "opaque": "a function or another object"}
_MOST_ITEMS = 1000
_EDGE = 3


@verb(
    "treering cat checkpoint step",
    "treering cat checkpoint 'params/w[:2, 3]'",
    "treering cat model.safetensors 'layer.weight[..., -1]'",
    "treering cat checkpoint params/w --npy > w.npy",
)
@PATH
@click.argument("key", metavar="KEY[SLICES]")
@click.option("--npy", is_flag=True, help="Write the array to stdout as a .npy file.")
@JSON
@click.option("--all", "everything", is_flag=True, help="Print every value, even of more than 1000.")
def cat(path: str, key: str, npy: bool, as_json: bool, everything: bool) -> int:
    """Print the leaf KEY of PATH, or the part of it in brackets; only the blocks that it needs are read and checked.

    PATH is the folder of a checkpoint, a leaves directory, a safetensors file, a msgpack file, or a run, whose latest
    step is read; treering inspect lists its keys. The brackets take integers, start:stop:step and ..., separated by
    commas, as in Python. Arrays of more than 1000 items are shown by their edges, unless you pass --all. Python values
    are printed as Python writes them.
    """
    if npy and (as_json or everything):
        raise click.UsageError(f"--npy and {'--json' if as_json else '--all'} exclude each other")
    with contextlib.ExitStack() as held:
        path, leaves = read_latest(path, lambda step: held.enter_context(open_leaf_by_leaf(step)))
        leaf, name, slices = _find_leaf(leaves, path, key)
        record = record_of(leaf)
        if record.dtype is None:
            if slices is not None or npy:
                without = "has no slices" if slices is not None else "cannot be written as .npy"
                kind = _NO_TYPES.get(record.kind, f"a Python {record.kind}")
                raise FormatError(f"{name!r} {without}, because it is not an array but {kind}")
            value = leaves.text(leaf) if isinstance(leaf, LeafRecord) else leaf
            opaque = isinstance(value, OpaqueLeaf)
            text = visible(value.text, _LONGEST_TEXT) if opaque else format_value(value, sys.maxsize)
            if as_json:
                _write_json(path, name, None, record, shape=None, value=value if has_json(value) else text)
            else:
                write_lines([text])
            return GOOD
        view = leaves.array(record)
        parts = ranges_of("..." if slices is None else slices, view.shape)
        if npy:
            _write_npy(view, parts)
        elif as_json:
            array = _read(view, parts)
            _write_json(path, name, slices, record, shape=array.shape, value=_plain(array))
        else:
            write_lines(_array_text(view, parts, everything=everything).split("\n"))
    return GOOD


def _find_leaf(leaves: OpenTree, path: str, request: str) -> tuple[Any, str, str | None]:
    """Find the leaf that a request names; raises with near names where there is none."""
    known = dict(leaves_of(leaves.listing.root))
    key, slices = split_request(request, known)
    if key in known:
        return known[key], key, slices
    if "*" in key:
        raise NotFoundError(f"cat takes one key, not a glob: {key!r}", hint="treering ls lists what a glob matches")
    if "[" in key and slices is None and not key.endswith("]"):
        raise FormatError(f"the bracket of {key!r} is not closed", hint=f"{key + ']'!r} closes it")
    below = [text for text in known if text.startswith(f"{key}/")] if key else list(known)
    if below or any(text == key for text, _ in nodes_of(leaves.listing.root)):
        what = f"{quoted_key(key)} is not a leaf of {path!r} but a branch of {len(below):,}"
        raise NotFoundError(what, hint=f"{below[0]!r} is its first leaf" if below else "it is empty")
    near = difflib.get_close_matches(key, list(known)[:10_000], n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "treering ls names its leaves"
    raise NotFoundError(f"{path!r} has no leaf {key!r}", hint=hint)


def _write_json(
    path: str, name: str, slices: str | None, record: LeafRecord, *, shape: tuple[int, ...] | None, value: object
) -> None:
    head = {"schema": "treering.cat/1", "file": path, "key": name, "slices": slices, "kind": record.kind}
    write_lines([json_text(head | {"dtype": record.dtype, "shape": shape, "value": value})])


def _read(view: ArrayView, parts: list[Selected]) -> NDArray[Any]:
    import numpy as np

    index: list[Part] = []
    for part in parts:
        if isinstance(part, range):
            stop = part.stop if part.step > 0 or part.stop >= 0 else None
            index.append(slice(part.start, stop, part.step) if part else slice(0, 0))
        else:
            index.append(part)
    return np.asarray(view[tuple(index)])


def _array_text(view: ArrayView, parts: list[Selected], *, everything: bool) -> str:
    """Print an array as numpy does, with as many digits as its values need; a large one by its edges."""
    import numpy as np

    from treering._values.casts import showable

    size = math.prod(len(part) for part in parts if not isinstance(part, int))
    abridged = size > _MOST_ITEMS and not everything
    array = showable(_edges(view, parts) if abridged else _read(view, parts))
    if not array.shape:
        return str(array[()])
    if not array.size:
        return f"[]  (shape {list(array.shape)})"
    if abridged:
        note(f"{size:,} items, shown by their edges; --all prints every one")
    most = 0 if abridged else sys.maxsize
    with np.printoptions(threshold=most, edgeitems=_EDGE, floatmode="unique", linewidth=100):
        return str(array)


def _edges(view: ArrayView, parts: list[Selected]) -> NDArray[Any]:
    """Read the first and last items along each axis, with one item of nothing where numpy will print dots."""
    import numpy as np

    shown = 2 * _EDGE + 1
    axes: list[list[tuple[Selected, slice | None]]] = []
    for part in parts:
        if isinstance(part, int):
            axes.append([(part, None)])
        elif len(part) <= shown:
            axes.append([(part, slice(0, len(part)))])
        else:
            axes.append([(part[:_EDGE], slice(0, _EDGE)), (part[-_EDGE:], slice(shown - _EDGE, shown))])
    array = np.zeros([min(len(part), shown) for part in parts if not isinstance(part, int)], view.dtype)
    for corner in itertools.product(*axes):
        into = tuple(place for _, place in corner if place is not None)
        array[into] = _read(view, [part for part, _ in corner])
    return array


def _plain(array: NDArray[Any]) -> Any:
    """Turn an array into nested lists of what JSON has: complex numbers as pairs, times and long doubles as text."""
    if array.dtype.kind == "c":
        import numpy as np

        return _plain(np.stack([array.real, array.imag], axis=-1))
    if array.dtype.kind in "mM" or array.dtype.itemsize > 8:  # noqa: PLR2004
        from treering._values.casts import showable

        return showable(array).astype(str).tolist()
    return array.tolist()


def _write_npy(view: ArrayView, parts: list[Selected]) -> None:
    """Write a selection to stdout as a .npy file, block by block."""
    import numpy as np

    from treering._inspect.diff import blocks_of

    if sys.stdout.isatty():
        hint = "write it to a file: --npy > array.npy"
        raise UnsupportedError("a .npy file cannot be shown on a terminal", hint=hint)
    dtype = view.dtype
    stored = np.dtype(np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(dtype)))
    if stored != dtype:
        stored = np.dtype(f"u{dtype.itemsize}")
        note(f".npy has no {dtype.name}: written as {stored.name}; .view(ml_dtypes.{dtype.name}) gives it back")
    shape = tuple(len(part) for part in parts if not isinstance(part, int))
    out = sys.stdout.buffer
    header = {"descr": np.lib.format.dtype_to_descr(stored), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(out, header)
    for box in blocks_of(shape, dtype.itemsize):
        sides = iter(box)
        inner = [part if isinstance(part, int) else part[next(sides)] for part in parts]
        out.write(memoryview(np.ascontiguousarray(_read(view, inner)).reshape(-1).view(np.uint8)))
    out.flush()


Part: TypeAlias = int | slice
Selected: TypeAlias = int | range
"""What is selected of one axis: one place, which drops the axis, or a range of them."""

_REST = "..."
_INT = re.compile(r"[+-]?(0|[1-9][0-9]{0,17})")
_EXAMPLES = "write KEY[2:10, -1] or KEY[..., ::2]: integers, start:stop:step, '...'"


def split_request(text: str, keys: Collection[str]) -> tuple[str, str | None]:
    """Divide a request into the key and the text between its last brackets; a key that is there wins.

    Example:
        >>> split_request("params/w[:2,3]", {"params/w"})
        ('params/w', ':2,3')
        >>> split_request("a[0]", {"a[0]"})
        ('a[0]', None)
    """
    if text in keys or not text.endswith("]") or "[" not in text:
        return text, None
    key, _, slices = text[:-1].rpartition("[")
    return key, slices


def ranges_of(text: str, shape: tuple[int, ...]) -> list[Selected]:
    """Read slices and say what they select of each axis of an array.

    Raises:
        FormatError: they are none, there are more than axes, or an integer is out of range.

    Example:
        >>> ranges_of(":2, -1", (5, 4, 3))
        [range(0, 2), 3, range(0, 3)]
    """
    items = [item.strip() for item in text.split(",")]
    if len(items) > 1 and not items[-1]:
        items.pop()  # a trailing comma, as Python allows it
    place = items.index(_REST) if _REST in items else len(items)
    given = [*items[:place], *items[place + 1 :]]
    if _REST in given:
        raise FormatError(f"[{text}] has '...' twice", hint=_EXAMPLES)
    parts: list[Part] = [_part(item, text) for item in given]
    if len(parts) > len(shape):
        what = f"[{text}] has {pluralize(len(parts), 'indices')}"
        raise FormatError(f"{what}, the array has {pluralize(len(shape), 'axes')}: {list(shape)}", hint=_EXAMPLES)
    parts[place:place] = [slice(None)] * (len(shape) - len(parts))
    return [_selected(part, length, axis) for axis, (part, length) in enumerate(zip(parts, shape, strict=True))]


def _part(item: str, text: str) -> Part:
    if _INT.fullmatch(item):
        return int(item)
    bounds = [bound.strip() for bound in item.split(":")]
    if len(bounds) not in (2, 3) or not all(not bound or _INT.fullmatch(bound) for bound in bounds):
        raise FormatError(f"[{text}] is not a slice: {item!r} cannot be read", hint=_EXAMPLES)
    start, stop, step = [int(bound) if bound else None for bound in [*bounds, ""][:3]]
    if step == 0:
        raise FormatError(f"[{text}] is not a slice: a step cannot be 0", hint=_EXAMPLES)
    return slice(start, stop, step)


def _selected(part: Part, length: int, axis: int) -> Selected:
    if isinstance(part, slice):
        return range(*part.indices(length))
    if not -length <= part < length:
        hint = f"{-length} to {length - 1} are there" if length else "the array is empty"
        raise FormatError(f"index {part} is out of range: axis {axis} has {pluralize(length, 'items')}", hint=hint)
    return part % length
