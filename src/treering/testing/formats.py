"""What readers and writers of formats must do, as tests that come with treering: for ours, and for those of others."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import random
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from treering._foreign.grid_arrays import make_source
from treering._store.posix.reading import LocalFile
from treering._store.resolve import is_folder, is_taken, located, open_file, write_file
from treering._values.boxes import slices, whole
from treering._values.human import pluralize
from treering.errors import TreeringError

if TYPE_CHECKING:
    from treering._arrays.source import Source

_HEADER_BYTES: Final = 64 << 10
_CUTS: Final = 4
_FLIPS: Final = 48
_OTHERS: Final = {"empty": b"", "text": b"a text\n", "json": b'{"a": 1}\n', "zip": b"PK\x03\x04" + bytes(30)}


class FormatContract(abc.ABC):
    """What tests of both kinds need."""

    @abc.abstractmethod
    def new_folder(self) -> Path:
        """Return a new, empty folder on this machine."""

    @abc.abstractmethod
    def module(self) -> Any:
        """Return the module that reads or writes the format."""


class ReaderContract(FormatContract):
    """What a reader of a format must do, as tests: name a subclass ``Test...``, and pytest runs them.

    Attributes:
        also_reads: what of ``tree.npz``, ``tree.msgpack``, ``tree.safetensors``, ``checkpoint`` and ``hf``, a Hugging
            Face folder, is of the format too.
    """

    also_reads: Collection[str] = ()

    @abc.abstractmethod
    def make_example(self, folder: Path) -> tuple[Path, Mapping[str, Any]]:
        """Write arrays into an empty folder; return the path that is read, and the arrays by key text."""

    def recognise(self, place: Path) -> str | None:
        """Return the version that the reader sees at a place."""
        version: str | None = self.module().recognise(place)
        return version

    def test_its_own_is_recognised_and_nothing_else(self) -> None:
        """It says which version it sees, and None at any file and folder of other programs."""
        path, _ = self.make_example(self.new_folder())
        _require(bool(self.recognise(path)), "its own is not recognised")
        for other in _write_others(self.new_folder()):
            if other.name not in self.also_reads and (found := self.recognise(other)) is not None:
                raise AssertionError(f"{other.name} is recognised as {found!r}")

    def test_arrays_and_parts_are_bit_for_bit(self) -> None:
        """Keys, dtypes, shapes and bits are those that were written; a box of an array is that box."""
        path, wanted = self.make_example(self.new_folder())
        found = self._read(path, parts=False)
        _require(found.keys() == wanted.keys(), f"keys {sorted(found)}, wanted {sorted(wanted)}")
        for parts in (False, True):
            for key, array in self._read(path, parts=parts).items():
                like = wanted[key][slices(_part(wanted[key].shape))] if parts else wanted[key]
                _require_same(array, like, f"a part of {key}" if parts else key)

    def test_opening_reads_headers_alone(self) -> None:
        """At most half of an example of more than 128 KiB is read before an array is asked for."""
        path, _ = self.make_example(self.new_folder())
        counted = mock.patch.object(LocalFile, "read", autospec=True, side_effect=LocalFile.read)
        with contextlib.ExitStack() as files, counted as read:
            self.module().open_foreign(located(path), files)
        done, size = sum(call.args[2] for call in read.call_args_list), sum(map(len, map(_content, _files_in(path))))
        _require(done <= max(_HEADER_BYTES, size // 2), f"{done} of {pluralize(size, 'bytes')} are read to open it")

    def test_damage_is_an_error_of_treering(self) -> None:
        """Cut off or flipped anywhere, it is a ``TreeringError``, or what was not touched is read."""
        chance = random.Random(0)  # noqa: S311 - the same damage each time
        path, _ = self.make_example(self.new_folder())
        for file in (files := _files_in(path)):
            data = _content(file)
            damaged = [data[: len(data) * cut // _CUTS] for cut in range(_CUTS)]
            places = [chance.randrange(len(data)) for _ in range(2 + _FLIPS // len(files)) if data]
            flipped = (data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :] for at in places)
            for content in [*damaged, *flipped, data]:
                write_file(file, [content], len(content))
                self._try_to_read(path)

    def test_links_lead_nowhere(self) -> None:
        """A file of a folder that it is not read without may be no link to one outside."""
        path, _ = self.make_example(self.new_folder())
        for number, file in enumerate(_files_in(path) if is_folder(path) else ()):
            away = file.rename(self.new_folder() / str(number))
            if self._try_to_read(path) is None:
                file.symlink_to(away)
                _require(self._try_to_read(path) is None, f"the link {file.name} is followed")
                file.unlink()
            away.rename(file)

    def _read(self, path: Path, *, parts: bool) -> dict[str, Any]:
        with contextlib.ExitStack() as files:
            source = make_source(self.module().open_foreign(located(path), files), mapped=False)
            return dict(_read_arrays(source, parts=parts))

    def _try_to_read(self, path: Path) -> dict[str, Any] | None:
        """Return the arrays of what may be damaged; None where that is an error of treering."""
        with contextlib.suppress(TreeringError):
            return self._read(path, parts=False) if self.recognise(path) is not None else None
        return None


class WriterContract(FormatContract):
    """What a writer of a format must do, as tests: name a subclass ``Test...``, and pytest runs them.

    Attributes:
        name: the name of a file or folder of the format.
    """

    name = "written"

    @abc.abstractmethod
    def read(self, path: Path) -> Mapping[str, Any]:
        """Return the arrays that stand at a path by key text, as another program reads them."""

    def test_arrays_are_read_as_they_were_and_stay(self) -> None:
        """Arrays come back bit for bit, none is a loss, and nothing is replaced without ``overwrite``."""
        path, tree = self.new_folder() / self.name, _make_tree()
        _require(not self._write(path, tree), "plain arrays are losses")
        with contextlib.suppress(TreeringError):
            self._write(path, {"other": tree["a"]})
            raise AssertionError("it was replaced")
        found = self.read(path)
        _require(found.keys() == tree.keys(), f"keys {sorted(found)}, wanted {sorted(tree)}")
        for key, array in tree.items():
            _require_same(found[key], array, key)

    def test_a_failed_write_leaves_nothing(self) -> None:
        """Where an array cannot be read, nothing of the others stays."""
        path = self.new_folder() / self.name
        fails = mock.patch("treering._arrays.source_arrays.to_host", side_effect=TreeringError("lost"))
        with contextlib.suppress(TreeringError), fails:
            self._write(path, _make_tree())
            raise AssertionError("it was written")
        _require(not _files_in(path), f"{_files_in(path)} stay")

    def test_what_is_no_array_is_written_or_named(self) -> None:
        """A leaf is a loss that names it, or it can be written."""
        for value in (None, True, 3, 2.5, 1j, "text", b"bytes"):
            losses = self._write(self.new_folder() / self.name, _make_tree() | {"leaf": value})
            _require({loss.name for loss in losses} <= {"leaf"}, f"{losses} are not losses")

    def _write(self, path: Path, tree: dict[str, Any]) -> list[Any]:
        """Write a tree if the form can hold it; return its losses."""
        from treering._arrays.source_arrays import tree_source
        from treering._background.writer import UNWATCHED
        from treering._format.selection import select
        from treering._tree.flatten import flatten

        source = tree_source(flatten(tree))
        part = select(source.index.structure, source.index.keys, at=None, only=None)
        if not (losses := list(self.module().find_losses(source, part, {}))):
            self.module().write(source, part, _save_options(path), UNWATCHED)
        return losses


def _require(holds: bool, broken: str) -> None:
    if not holds:
        raise AssertionError(broken)


def _require_same(found: Any, wanted: Any, key: str) -> None:
    wanted = wanted.astype(wanted.dtype.newbyteorder("="))
    same = (found.shape, found.dtype, found.tobytes()) == (wanted.shape, wanted.dtype, wanted.tobytes())
    _require(same, f"{key} is not what was written")


def _part(shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((length // 3, length - length // 4) for length in shape)


def _read_arrays(source: Source, *, parts: bool) -> Iterator[tuple[str, Any]]:
    from treering._arrays.incoming import ReadRequest

    for leaf, key in enumerate(source.index.keys):
        kind = source.index.type_of(leaf)
        if kind.stored:
            request = ReadRequest(leaf, [(_part if parts else whole)(kind.shape or ())])
            source.arrays.read([request])
            yield key, request.arrays[0]


def _files_in(path: Path) -> list[Path]:
    if is_folder(path):
        return sorted(file for file in path.rglob("*") if not is_folder(file))
    return [path] if is_taken(path) else []


def _content(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read(0, file.size)


def _make_tree() -> dict[str, Any]:
    import numpy as np

    shapes = {"a": ((2, 3), "f4"), "b": ((2,), "i1"), "c": ((), "f2"), "d": ((0, 2), "i4"), "e": ((2,), "?")}
    return {name: np.ones(shape, dtype) for name, (shape, dtype) in shapes.items()}


def _save_options(path: Path) -> Any:
    from treering._checkpoint.save_options import SaveOptions

    save = SaveOptions.of(path, metadata={}, overwrite=False, progress=None, timeout=None, suffixes=(path.suffix,))
    return dataclasses.replace(save, metadata={})


def _write_others(folder: Path) -> list[Path]:
    import numpy as np

    from treering.checkpoint import export

    for name, data in _OTHERS.items():
        write_file(folder / name, [data], len(data))
    write_file(folder / "folder" / "text", [b"a text"], 6)
    np.savez(folder / "tree.npz", **_make_tree())
    for name in ("checkpoint", "tree.msgpack", "tree.safetensors", "hf"):
        export(folder / name, _make_tree(), to="hf" if name == "hf" else None)
    return sorted(folder.glob("*"))
