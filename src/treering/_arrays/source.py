"""An opened tree: what is in it, and what gives boxes of its arrays."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from treering._arrays.incoming import ReadRequest
from treering._arrays.jobs import Progress, aligned_empty
from treering._format.index import Index
from treering._plan.load import StoredChunk
from treering._store.open_folder import OpenedFiles
from treering._values.boxes import Box, slices, whole
from treering._values.human import pluralize

if TYPE_CHECKING:
    from numpy.typing import NDArray

Key: TypeAlias = int | slice | EllipsisType | tuple[int | slice | EllipsisType | None, ...] | None


def box_and_rest(key: Any, shape: tuple[int, ...]) -> tuple[Box, tuple[int, ...] | None, tuple[Any, ...]]:
    """Return the smallest box that holds all that ``key`` selects, its steps, and the key to apply to what they pick.

    The steps are the stride along each axis of the box; None: every item is selected.

    Args:
        key: integers, slices, ``...`` and None, as numpy takes them; no lists, arrays or booleans.
        shape: the shape that is indexed.

    Raises:
        IndexError: too many indices, or one that is out of bounds.
        TypeError: something else than basic indexing.

    Example:
        >>> box_and_rest((slice(None), -1), (4, 5))
        (((0, 4), (4, 5)), None, (slice(None, None, None), 0))
        >>> box_and_rest(..., ())
        ((), None, (Ellipsis,))
        >>> box_and_rest(slice(6, 1, -2), (8,))
        (((2, 7),), (2,), (slice(None, None, -1),))
        >>> box_and_rest((slice(5, 9), -1), (1 << 62, 1 << 62))[0]  # the shape alone costs nothing
        ((5, 9), (4611686018427387903, 4611686018427387904))
    """
    parts = list(key) if isinstance(key, tuple) else [key]
    if (used := sum(part is not None and part is not Ellipsis for part in parts)) > len(shape):
        raise IndexError(f"too many indices: the leaf has {pluralize(len(shape), 'axes')}, {used} were indexed")
    dots = [at for at, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    at = dots[0] if dots else len(parts)
    parts[at : at + 1] = [slice(None)] * (len(shape) - used)
    box: list[tuple[int, int]] = []
    steps: list[int] = []
    rest: list[Any] = []
    for part in parts:
        if part is None:
            rest.append(None)
            continue
        side, step, inner = _side(part, shape[len(box)], len(box))
        box.append(side)
        steps.append(step)
        rest.append(inner)
    if dots:  # numpy then returns an array, also one without axes
        rest.append(Ellipsis)
    return tuple(box), tuple(steps) if max(steps, default=1) > 1 else None, tuple(rest)


def _side(part: Any, length: int, axis: int) -> tuple[tuple[int, int], int, int | slice]:
    """Return the range of one axis that holds what is selected, the step inside it, and the index of what they pick."""
    if isinstance(part, slice):
        if not (picked := range(*part.indices(length))):
            return (0, 0), 1, slice(None)
        low, high = min(picked[0], picked[-1]), max(picked[0], picked[-1]) + 1
        step = abs(picked.step) if len(picked) > 1 else 1
        return (low, high), step, slice(None, None, -1 if picked.step < 0 else None)
    if isinstance(part, bool):
        raise TypeError("a leaf in a file is indexed with integers, slices, ... and None")
    try:
        index = operator.index(part)
    except TypeError as error:
        hint = "read what is needed with slices, and index the array that comes back"
        raise TypeError(f"a leaf in a file is not indexed with {type(part).__name__}; {hint}") from error
    if not -length <= index < length:
        raise IndexError(f"index {index} is out of bounds for axis {axis} with size {length}")
    return (index % length, index % length + 1), 1, 0


class Arrays(Protocol):
    """What gives boxes of leaves."""

    def read(self, requests: Sequence[ReadRequest], progress: Progress | None = None) -> None:
        """Fill ``arrays`` of every request."""

    def check_files(self) -> None:
        """Require every file to be there and its header to be intact."""

    def dtype_of(self, leaf: int) -> np.dtype[Any]:
        """Return the dtype of what is stored of a leaf."""

    def stored_chunks(self, leaf: int) -> tuple[StoredChunk, ...]:
        """Return how a stored leaf lies; nothing where no part of it can be read without the rest."""


@dataclasses.dataclass(slots=True)
class Source:
    """An opened tree.

    Attributes:
        index: what is in it.
        arrays: its arrays.
        structured: whether its containers are those that were saved.
        raw_keys: whether it knows no typed PRNG keys.
        mapped: whether arrays may be maps of the files.
        held: whether arrays are the source's own memory, the same at every read.
        is_current: tells whether what was opened still stands at the path; it may be False only where a save there can
            take files away from an opened tree, or where it has no checksums.
        opened: the files of a tree without checksums, as far as they are known.
        most_tries: how often it is opened at most, where it is replaced each time before it was read.
        layers: the opened trees that it is made of, the lowest first; none where it is one.
        paths: where they are.
        origins: the numbers of the layers that each leaf comes from.
    """

    index: Index
    arrays: Arrays
    _: dataclasses.KW_ONLY
    structured: bool = True
    raw_keys: bool = False
    mapped: bool = False
    held: bool = False
    is_current: Callable[[], bool] = lambda: True
    most_tries: int = 100
    opened: OpenedFiles | None = None
    layers: Sequence[Source] = ()
    paths: Sequence[str] = ()
    origins: Sequence[tuple[int, ...]] = ()

    def __post_init__(self) -> None:
        if self.opened is not None:
            self.is_current = self.opened.is_current

    def is_consistent(self, *, joint: bool) -> bool:
        """Tell whether all that was read is of one save: checksums say so, or that no file was written meanwhile.

        Args:
            joint: whether several processes read it, each by the path.

        Raises:
            StoreError: the store refuses to say.
        """
        if self.layers:
            return all(layer.is_consistent(joint=joint) for layer in self.layers)
        if self.index.verified or self.is_current():
            return True
        return not joint and self.opened is not None and self.opened.is_whole()

    def is_written_into(self) -> bool:
        """Tell whether a file without checksums was written into after it was opened."""
        if self.layers:
            return any(layer.is_written_into() for layer in self.layers)
        return self.opened is not None and not self.index.verified and self.opened.is_written_into()


class HeldArrays:
    """Gives boxes of arrays that somebody already read.

    Args:
        arrays: leaf number -> array; nobody else writes to them.
    """

    def __init__(self, arrays: Mapping[int, NDArray[Any]]) -> None:
        self._arrays = arrays
        self._given: set[int] = set()

    def check_files(self) -> None:
        """There are none."""

    def dtype_of(self, leaf: int) -> np.dtype[Any]:
        """Return the dtype of a leaf."""
        return self._arrays[leaf].dtype

    def stored_chunks(self, leaf: int) -> tuple[StoredChunk, ...]:
        """Return nothing: all of it was read already."""
        del leaf
        return ()

    def read(self, requests: Sequence[ReadRequest], progress: Progress | None = None) -> None:
        """Fill ``arrays`` of every request: whole arrays as they are, parts as copies."""
        total = sum(self._arrays[request.leaf].nbytes for request in requests)
        done = 0
        for request in requests:
            held = self._arrays[request.leaf]
            every = whole(held.shape)
            # Two leaves of a result share no memory, also where both are made of this one.
            first = request.leaf not in self._given
            self._given.add(request.leaf)
            as_it_is = first and request.steps is None
            request.arrays = [
                held if as_it_is and box == every else _copy(held[slices(box, request.steps)]) for box in request.boxes
            ]
            done += held.nbytes
            if progress is not None:
                progress(done, total)


def _copy(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy in memory that jax takes as it is."""
    copy = aligned_empty(array.shape, array.dtype)
    copy[...] = array
    return copy
