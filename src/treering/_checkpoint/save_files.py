"""A tree -> one safetensors file that carries its own index, and what writes every single file, durably."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from treering._arrays.jobs import Progress, Tally
from treering._arrays.outgoing import ALONE, WHOLE, SaveData, SavedPart, SaveLayout
from treering._arrays.plan_cache import TreePlan, plan_tree
from treering._arrays.source import Source
from treering._arrays.source_arrays import describe_source
from treering._background.writer import UNWATCHED, Watch
from treering._checkpoint.forms import Loss, lost_leaves, lost_members
from treering._checkpoint.save_folder import flatten_source, make_index
from treering._checkpoint.save_options import SaveOptions
from treering._codec.documents import check_json
from treering._format.safetensors import RESERVED, check_single_file, check_single_metadata, why_not_stored
from treering._format.selection import Selection
from treering._store.pieces import Buffer
from treering._store.resolve import is_taken, write_file
from treering._values.keys import split_key
from treering._values.telemetry import phase
from treering.errors import ExistsError, UnsupportedError

_T = TypeVar("_T")


class SafetensorsSave:
    """A tree of arrays, to be written as a safetensors file that carries its own index.

    The checksums stand in the header, which comes first: every array is read twice, but for some MiB of small ones.

    Attributes:
        nbytes: how much memory its snapshot takes.
    """

    def __init__(self, plan: TreePlan) -> None:
        self._plan = plan
        self.nbytes = plan.nbytes

    @classmethod
    def of(cls, tree: Any, metadata: Mapping[str, Any], part: SavedPart = WHOLE) -> SafetensorsSave:
        """Return the tree, ready to be written.

        Raises:
            UnsupportedError: leaves that the form cannot hold, by name, or metadata.
            MismatchError: nothing matches a glob.
        """
        plan = plan_tree(tree, ALONE, part)
        check_single_file(plan.flat.keys, plan.leaves.types, plan.leaves.leaf_types)
        check_json(metadata, "metadata")
        check_single_metadata(metadata)
        return cls(plan)

    def snapshot(self, options: SaveOptions) -> SafetensorsSave:
        """Return the same with arrays that nobody changes any more."""
        del options
        return SafetensorsSave(self._plan.snapshot())

    def write(self, options: SaveOptions, watch: Watch = UNWATCHED) -> None:
        """Write the file; ``treering.save`` says more."""
        metadata = options.json_metadata()
        _require_free(options)
        attempt = secrets.token_hex(8)
        flat, layout = self._plan.flat, self._plan.single_layout()
        first = SaveData(layout, None)
        for _ in first.data_of(0, kept=False):
            pass
        index = make_index(flat, layout, first.checksums, metadata, attempt=attempt)
        header = self._plan.single_header(index, layout.headers[0])
        buffers = claim_at_end(_read_again(header, layout, first, options.progress, flat.keys), watch)
        size = len(header) + layout.data_bytes
        with phase("save/write") as moved:
            write_file(options.path, buffers, size, new=not options.overwrite, unique=True)
            moved.nbytes = size


def find_losses(source: Source, part: Selection, metadata: Mapping[str, Any]) -> Iterator[Loss]:
    """Yield the leaves that are no arrays of its dtypes, and what the file says itself."""
    yield from lost_leaves(source, part, why_not_stored)
    yield from lost_members(name for name in metadata if name in RESERVED)


def write(source: Source, part: Selection, save: SaveOptions, watch: Watch) -> None:
    """Write the file, which has checksums of its own."""
    plan = TreePlan(flat=flatten_source(source, part), leaves=describe_source(source, part), processes=ALONE)
    SafetensorsSave(plan).write(save, watch)


def write_buffers(
    buffers: Iterable[Buffer], size: int, options: SaveOptions, watch: Watch, *, unique: bool = False
) -> None:
    """Write a file of so many bytes.

    ``unique`` says that something random in them makes them differ from those of every other save: without it, a
    file that is overwritten in a bucket is not safe from late requests, and a warning says so.

    Raises:
        ExistsError: something is at the path.
        StoreError: the store refuses.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "a.tiny")
        >>> save = SaveOptions.of(path, metadata=None, overwrite=False, progress=None, timeout=None)
        >>> write_buffers([b"one", b"two"], 6, save, UNWATCHED)
        >>> path.read_bytes()
        b'onetwo'
    """
    _require_free(options)
    counted = claim_at_end(Tally(size, options.progress).counted(buffers), watch)
    with phase("save/write") as moved:
        write_file(options.path, counted, size, new=not options.overwrite, unique=unique)
        moved.nbytes = size


def _require_free(options: SaveOptions) -> None:
    """Refuse to replace a file without the caller's permission.

    Raises:
        ExistsError: something is at the path.
    """
    if not options.overwrite and is_taken(options.path):
        raise ExistsError(f"{os.fspath(options.path)!r} exists", hint="overwrite=True replaces it")


def claim_at_end(buffers: Iterable[_T], watch: Watch) -> Iterator[_T]:
    """Yield what a file is made of; at its end, before the file gets its name, the save can no longer be cancelled."""
    watch.move()
    for buffer in buffers:
        yield buffer
        watch.move()
    watch.claim()


def _read_again(
    header: bytes, layout: SaveLayout, first: SaveData, progress: Progress | None, keys: Sequence[str]
) -> Iterator[bytes | memoryview]:
    """Yield the file; at its end, require that the second reading of the arrays found what the first one did."""
    second = SaveData(layout, progress, first)
    yield header
    yield from second.data_of(0)
    if (changed := second.first_other(first)) is not None:
        what = "the array was changed while it was being saved"
        raise UnsupportedError(what, path=split_key(keys[changed]), hint="save again; nothing was replaced")
