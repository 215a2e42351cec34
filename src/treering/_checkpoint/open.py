"""A checkpoint opened lazily: its keys, and views that read only what is asked of them."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from treering._arrays.derived_source import map_source
from treering._arrays.incoming import ReadRequest
from treering._arrays.jobs import on_host
from treering._arrays.source import Key, Source, box_and_rest
from treering._background.saves import finish_saves
from treering._checkpoint.forms import Where, open_source, paths_of
from treering._checkpoint.source import require_no_loss
from treering._format.index import ARRAY_KINDS, Index, LeafType, leaf_bytes
from treering._format.listing import LeafRecord, list_index
from treering._format.structure import build
from treering._keymap.key_map import KeyMap, check_key_map
from treering._printable import LONGEST_LINE, cut_middle, printable, show_path
from treering._store.api import Closable
from treering._values.boxes import whole
from treering._values.human import bytes_text, near, pluralize
from treering._values.outline import InNotebook, Outline
from treering._view.listings import notes_of, tree_outline
from treering._view.plain import members_of
from treering.errors import (
    BusyError,
    ClosedError,
    CorruptError,
    MismatchError,
    NoSuchLeafError,
    NotFoundError,
    TreeringError,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SHOWN: Final = 20
_MOST_SHOWN_BITS: Final = 14_000


class LeafView(InNotebook):
    """An array that still lies in its file. Slicing it reads what the slice needs, checked, as numpy.

    Basic indexing only: integers, slices, ``...`` and None. ``view[...]`` and ``numpy.asarray(view)`` read all of it.

    Attributes:
        key: key text of the leaf.
        kind: "jax", "numpy", "numpy scalar", or "key" (a typed PRNG key, of which the uint32 data is shown).
        shape: shape of the array.
        dtype: numpy dtype of the array.
        nbytes: its bytes.
        sharding: how it lay on devices when it was saved, as text; None where it was on one device.
    """

    def __init__(self, checkpoint: Checkpoint, number: int, leaf_type: LeafType, dtype: np.dtype[Any]) -> None:
        self._checkpoint = checkpoint
        self._number = number
        self.key: str = checkpoint.index.keys[number]
        self.kind: str = leaf_type.kind
        self.shape: tuple[int, ...] = leaf_type.shape or ()
        self.dtype = dtype
        self.nbytes: int = leaf_bytes(leaf_type)
        self.sharding: str | None = leaf_type.sharding

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many items it has."""
        return self.nbytes // self.dtype.itemsize

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a leaf without axes")
        return self.shape[0]

    def __getitem__(self, key: Key) -> NDArray[Any]:
        box, steps, rest = box_and_rest(key, self.shape)
        return cast("NDArray[Any]", self._checkpoint.box(self._number, box, steps)[rest])

    def __iter__(self) -> Iterator[NDArray[Any]]:
        if not self.shape:  # Python would take an error of the first index for the end
            raise TypeError("iteration over a 0-d array")
        return map(self.__getitem__, range(self.shape[0]))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("the array lies in a file: reading it is a copy")
        array: NDArray[Any] = self._checkpoint.box(self._number, whole(self.shape))
        return array if dtype is None else array.astype(dtype)

    def __repr__(self) -> str:
        return f"LeafView({self.key!r}: {self.dtype.name}{list(self.shape)}, {bytes_text(self.nbytes)}, {self.kind})"

    def _outline(self) -> Outline:
        members = members_of(self, "kind", "shape", "nbytes", "sharding")
        record = LeafRecord(dtype=self.dtype.name, offset=None, **members)
        return tree_outline({self.key: record}, title="LeafView", notes=self._checkpoint.place_notes)


class Checkpoint(InNotebook, Closable, Mapping[str, Any]):
    """A checkpoint or single file opened for reading: key text -> ``LeafView``, or the value of a Python leaf.

    A context manager; views work until it is closed. What a later save does to the path is not seen here, but a save
    into a leaves directory takes away what it replaces: reading that is ``BusyError`` then. So is reading a single file
    without checksums that was written into. Of folders that other programs write anew, new files may be read.

    Attributes:
        index: everything that is known without reading an array; its form may change between versions.
    """

    def __init__(self, paths: Sequence[str], source: Source, closing: contextlib.ExitStack) -> None:
        self._paths = paths
        self._path = " + ".join(paths)
        self._source = source
        self._closing = closing
        self._closed = False
        self._looked_up = False
        self.index: Index = source.index

    def close(self) -> None:
        """Close the files."""
        self._closed = True
        self._closing.close()

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the user wrote beside the tree."""
        return self.index.metadata

    @property
    def structure(self) -> Any:
        """The tree with its own containers; in place of each leaf its ``LeafView``, or its value."""
        return build(self.index.structure, list(self.values()))

    def origin(self, key: str) -> str:
        """Return the path of the checkpoint that a leaf comes from, where several lie over each other; else the path.

        Raises:
            NoSuchLeafError: there is no such leaf.
            MismatchError: the ``KeyMap`` makes it of leaves of several of them.
        """
        if (number := self._known.get(key)) is None:
            raise self._no_such(key)
        found = [self._paths[layer] for layer in self._source.origins[number]] if self._source.layers else self._paths
        if len(found) > 1:
            raise MismatchError(f"the key map makes {key!r:.400} of leaves of {', '.join(map(repr, found))}")
        return found[0]

    def __getitem__(self, key: str) -> LeafView | Any:
        if not self._looked_up:
            # Who reads one leaf needs no dict of all.
            self._looked_up = True
            with contextlib.suppress(ValueError):
                return self._leaf(self.index.keys.index(key))
        if (number := self._known.get(key)) is None:
            raise self._no_such(key)
        return self._leaf(number)

    def __contains__(self, key: object) -> bool:
        return key in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self.index.keys)

    def __len__(self) -> int:
        return len(self.index.keys)

    def box(self, number: int, box: tuple[tuple[int, int], ...], steps: tuple[int, ...] | None = None) -> NDArray[Any]:
        """Return one box of a stored leaf, with a stride per axis if there are ``steps``, read and checked."""
        self._require_open(number)
        try:
            found = self._read(ReadRequest(number, (box,), steps=steps))
        except (TreeringError, OSError):
            self._require_open(number)
            raise
        # Where another thread has closed it meanwhile, the numbers of its files may be those of others.
        self._require_open(number)
        return found

    def _require_open(self, number: int) -> None:
        if self._closed:
            hint = "read what you need before it is closed, inside the `with` block"
            raise ClosedError(f"{self._path!r} was closed, and {self.index.keys[number]!r} lies in it", hint=hint)

    def _read(self, request: ReadRequest) -> NDArray[Any]:
        key = self.index.keys[request.leaf]
        try:
            self._source.arrays.read([request], None)
        except (CorruptError, NotFoundError) as error:
            if self._source.is_current():
                require_no_loss(error)
                raise
            message = f"{self._path!r} was saved again after it was opened, and {key!r} is gone"
            raise BusyError(message, hint="open it again") from error
        if self._source.is_written_into():
            raise BusyError(f"{self._path!r} was written into after it was opened", hint="open it again")
        return request.arrays[0].copy() if self._source.held else request.arrays[0]

    def _leaf(self, number: int) -> Any:
        leaf_type = self.index.type_of(number)
        if not leaf_type.stored:
            return self.index.values[number]
        if leaf_type.kind in ARRAY_KINDS:
            return LeafView(self, number, leaf_type, self._source.arrays.dtype_of(number))
        return on_host(self.box(number, whole(leaf_type.shape or ())), leaf_type.kind)

    @functools.cached_property
    def _known(self) -> dict[str, int]:
        return {key: number for number, key in enumerate(self.index.keys)}

    def _no_such(self, key: object) -> NoSuchLeafError:
        branch = sum(text.startswith(f"{key}/") for text in self.index.keys)
        close = near(str(key), self.index.keys)
        found = f"; did you mean {close!r}?" if close else ""
        if branch:
            found = f"; {pluralize(branch, 'leaves lie')} below it"
        where = self._path if len(self._paths) == 1 else self._paths
        hint = f"treering.load({where!r:.200}, at={key!r:.200}) loads the branch" if branch else None
        return NoSuchLeafError(f"{self._path!r} has no leaf {key!r:.400}{found}", hint=hint)

    def __repr__(self) -> str:
        arrays = sum(leaf_bytes(self.index.type_of(number)) for number in range(len(self)))
        shown = [
            f"  {printable(cut_middle(key, LONGEST_LINE))}: {self._short(number)}"
            for number, key in enumerate(self.index.keys[:_SHOWN])
        ]
        more = [f"  ... and {len(self) - _SHOWN} more"] if len(self) > _SHOWN else []
        title = f"Checkpoint({show_path(self._path)!r}: {pluralize(len(self), 'leaves')}, {bytes_text(arrays)})"
        return "\n".join([title, *shown, *more])

    def _short(self, number: int) -> str:
        leaf_type = self.index.type_of(number)
        if leaf_type.stored:
            return f"{leaf_type.dtype}{list(leaf_type.shape or ())} {leaf_type.kind}"
        value = self.index.values[number]
        if type(value) is int and value.bit_length() > _MOST_SHOWN_BITS:  # Python makes no text of more digits
            return f"an int of {value.bit_length()} bits"
        return f"{value!r:.60}"

    @property
    def place_notes(self) -> list[tuple[str, str]]:
        """What a notebook says of where it is."""
        return [("in", show_path(self._path)), *([("closed", "what lies in its files cannot be read")] * self._closed)]

    def _outline(self) -> Outline:
        # From the index that was read when it was opened: no file is touched, and no store is asked.
        listing = list_index(self.index, form="", files=(), file_bytes=0)
        return tree_outline(listing.root, title="Checkpoint", notes=[*self.place_notes, *notes_of(listing)[1:]])


def open_path(path: Where, key_map: KeyMap | None = None) -> Checkpoint:
    """Open what stands at ``path``; ``treering.open`` says more."""
    paths = paths_of(path)
    check_key_map(key_map)
    for one in paths:
        finish_saves(one)
    with contextlib.ExitStack() as files:
        source = open_source(paths if len(paths) > 1 else paths[0], files, mapped=False)
        source = source if key_map is None else map_source(source, key_map)
        shown = list(path) if isinstance(path, list | tuple) else [path]
        checkpoint = Checkpoint([os.fspath(cast("Any", one)) for one in shown], source, closing := files.pop_all())
    # For one that nobody closes. At the end of the program the system does it.
    weakref.finalize(checkpoint, closing.close).atexit = False
    return checkpoint
