"""Two checkpoints or files -> what they do not have in common; arrays are read block by block, never with jax."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, cast

from treering._format.listing import LeafRecord
from treering._inspect.open_tree import ArrayView, OpenTree, open_leaf_by_leaf
from treering._printable import show_path
from treering._store.resolve import kept
from treering._values.human import pluralize
from treering._view.differences import ABSENT, Difference, compare_listings, needs_reading, pair_nodes
from treering._view.progress import Progress, reporter, showing
from treering._view.rows import is_branch, record_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLOCK_BYTES: Final = 8 << 20
_MOST_LINES: Final = 100


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """What two checkpoints do not have in common. It is true when there are differences, like a list of them."""

    a: str
    """The first path, as it was given."""
    b: str
    """The second path."""
    differences: tuple[Difference, ...]
    """Each with ``key``, ``what``, ``a`` and ``b``; the order is that of the first one's tree."""
    leaves: int
    """Leaves that were compared, those that only one side has included."""
    values: bool
    """Whether the values of arrays were read and compared."""

    def __len__(self) -> int:
        return len(self.differences)

    def __iter__(self) -> Iterator[Difference]:
        return iter(self.differences)

    def __str__(self) -> str:
        if not self.differences:
            return sameness(self, reading="values=True")
        count = len(self.differences)
        lines = [f"{pluralize(count, 'differences', ',')} between A = {self.a!r} and B = {self.b!r}:"]
        lines += [f"  {difference}" for difference in self.differences[:_MOST_LINES]]
        if count > _MOST_LINES:
            lines.append(f"  ... and {count - _MOST_LINES:,} more")
        return "\n".join(lines)


def sameness(found: Diff, *, reading: str) -> str:
    """Say how far two checkpoints without differences are the same; ``reading`` is what makes a diff read arrays."""
    how = "equal bit for bit" if found.values else f"equal as far as headers tell ({reading} reads the arrays)"
    return f"{pluralize(found.leaves, 'leaves', ',')}, {how}"


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    values: bool = False,
    progress: Progress | bool | None = None,
) -> Diff:
    """Compare two checkpoints or files: structure, kinds, dtypes, shapes, small values and metadata.

    Any two forms can be compared; what only one of them keeps (kinds of containers, whether an array was numpy's) is
    then no difference. Neither is the order of a dict's keys, where arrays lay on devices, who wrote it and when.

    Args:
        a: a checkpoint's folder, a leaves directory, a safetensors file or a msgpack file.
        b: another one.
        values: also read all arrays that both have, and compare them bit for bit: NaN equals the same NaN, 0.0 and
            -0.0 differ. Memory stays at some MiB for each side, whatever the arrays' size.
        progress: called as ``progress(done, total)`` with bytes of arrays. True shows a bar on a terminal.

    Raises:
        NotFoundError, StoreError: one of them cannot be read.
        CorruptError: one of them is damaged.
        FormatError: one of them has another form.

    Example:
        >>> from treering import serialization
        >>> serialization.save_to_file({"step": 7, "w": [1.0, 2.0]}, "a.msgpack")
        >>> serialization.save_to_file({"step": 8, "w": [1.0, 2.0]}, "b.msgpack")
        >>> found = diff("a.msgpack", "b.msgpack")
        >>> bool(found), [str(difference) for difference in found]
        (True, ['step: value: 7 in A, 8 in B'])
    """
    told = reporter(progress, "comparing")
    a, b = kept(a), kept(b)
    with showing(told), open_leaf_by_leaf(a) as left, open_leaf_by_leaf(b) as right:
        found = list(compare_listings(left.listing, right.listing))
        pairs = pair_nodes(left.listing.root, right.listing.root)
        count = sum(1 for _, *nodes in pairs if any(node is not ABSENT and not is_branch(node) for node in nodes))
        if values:
            found += _differing_values(left, right, told)
        return Diff(
            a=show_path(os.fspath(a)), b=show_path(os.fspath(b)), differences=tuple(found), leaves=count, values=values
        )


def blocks_of(shape: tuple[int, ...], itemsize: int, limit: int = _BLOCK_BYTES) -> Iterator[tuple[slice, ...]]:
    """Cut an array into boxes of at most ``limit`` bytes, in C order, each as few rows as fit.

    Example:
        >>> [box[0] for box in blocks_of((5, 100), 4, limit=800)]
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
        >>> len(list(blocks_of((2, 4), 8, limit=16))), list(blocks_of((), 4))
        (4, [()])
    """
    row = itemsize * math.prod(shape[1:])
    if not shape or row * shape[0] <= limit:
        yield tuple(slice(0, length) for length in shape)
    elif row <= limit:
        step = limit // row
        inner = tuple(slice(0, length) for length in shape[1:])
        for start in range(0, shape[0], step):
            yield (slice(start, min(start + step, shape[0])), *inner)
    else:
        for start in range(shape[0]):
            for inner in blocks_of(shape[1:], itemsize, limit):
                yield (slice(start, start + 1), *inner)


def _differing_values(a: OpenTree, b: OpenTree, progress: Progress | None) -> Iterator[Difference]:
    """Read what both sides have in one form, and compare it."""
    pairs = [each for each in pair_nodes(a.listing.root, b.listing.root) if needs_reading(*each[1:])]
    total = sum(record_of(left).nbytes for _, left, _ in pairs)
    done = 0
    for key, left, right in pairs:
        before = done

        def report(read: int, before: int = before) -> None:
            if progress is not None:
                progress(before + read, total)

        is_array = isinstance(left, LeafRecord) and left.dtype is not None
        found = _arrays(key, a.array(left), b.array(right), report) if is_array else _texts(key, a, left, b, right)
        if found is not None:
            yield found
        done += record_of(left).nbytes
        report(record_of(left).nbytes)


def _texts(key: str, a: OpenTree, left: Any, b: OpenTree, right: Any) -> Difference | None:
    """Compare two texts, of which one or both still lie in their file."""
    x = a.text(left) if isinstance(left, LeafRecord) else left
    y = b.text(right) if isinstance(right, LeafRecord) else right
    if x == y:
        return None
    first = next((at for at, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), min(len(x), len(y)))
    sides = [repr(text[max(first - 10, 0) : first + 30]) for text in (x, y)]
    return Difference(key=key, what="values", a=sides[0], b=sides[1], detail=f"from place {first} on")


def _arrays(key: str, a: ArrayView, b: ArrayView, report: Callable[[int], None]) -> Difference | None:
    """Compare two arrays of one dtype and shape, block by block."""
    import numpy as np

    differing = items = done = 0
    where: tuple[int, ...] = ()
    sides: list[str] = []
    for box in blocks_of(a.shape, a.dtype.itemsize):
        left, right = np.asarray(a[box], order="C"), np.asarray(b[box], order="C")
        items += left.size
        if (unequal := _unequal_items(left, right)) is not None:
            if not differing:
                inner = np.unravel_index(int(unequal.argmax()), left.shape)
                where = tuple(int(at) + side.start for at, side in zip(inner, box, strict=True))
                sides = _describe_pair(left[inner], right[inner])
            differing += int(unequal.sum())
        done += left.nbytes
        report(done)
    if not differing:
        return None
    detail = f"{differing:,} of {pluralize(items, 'items', ',')} differ, the first at {[*where]}"
    return Difference(key=key, what="values", a=sides[0], b=sides[1], detail=detail)


def _unequal_items(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any] | None:
    """Mark the items whose bits differ, as a flat array; None where all are equal."""
    import numpy as np

    left, right = (array.reshape(-1).view(np.uint8) for array in (a, b))
    if np.array_equal(left, right):
        return None
    return cast("NDArray[Any]", (left != right).reshape(-1, a.dtype.itemsize).any(axis=1))


def _describe_pair(a: Any, b: Any) -> list[str]:
    """Write two items; with their bits where they look the same, as two NaNs do."""
    texts = [str(a), str(b)]
    if texts[0] != texts[1]:
        return texts
    return [f"{text} (0x{item.tobytes()[::-1].hex()})" for text, item in zip(texts, (a, b), strict=True)]
