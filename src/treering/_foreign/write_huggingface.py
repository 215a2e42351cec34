"""A tree -> a Hugging Face folder: safetensors files of bounded size, and the index that says which holds what.

Source: https://huggingface.co/docs/safetensors, and ``save_pretrained`` of transformers.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from treering._arrays.host import host_blocks
from treering._arrays.jobs import Tally
from treering._arrays.outgoing import DescribedLeaves
from treering._arrays.source import Source
from treering._arrays.source_arrays import describe_source
from treering._background.writer import Watch
from treering._checkpoint import forms
from treering._checkpoint.detect import refuse_other_form
from treering._checkpoint.save_files import claim_at_end
from treering._checkpoint.save_options import SaveOptions
from treering._format.index import LeafType, leaf_bytes
from treering._format.safetensors import DTYPES, LARGEST_HEADER, frame, header_text
from treering._format.selection import Selection
from treering._store.api import Outcome, Store
from treering._store.failures import naming
from treering._store.resolve import remove_made, require_space, store_at, write_file
from treering._values.dtypes import itemsize_of
from treering._values.human import join_first, pluralize
from treering._values.keys import join_key, split_key
from treering._values.telemetry import phase
from treering.errors import ExistsError, StoreError, UnsupportedError

_ALONE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_FORMAT: Final = {"format": "pt"}
_OWN: Final = ("format", "total_size")
_FILE_BYTES: Final = 5_000_000_000
_SIZE: Final = re.compile(r"([0-9]{1,15}) ?([KMGT]?)(i?)B?", re.IGNORECASE)
_WEIGHTS: Final = re.compile(
    r".*\.safetensors(\.index\.json)?|pytorch_model.*|.*\.gguf|treering\.json|tensorstore_index\.json"
)
_SHOWN: Final = 3
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


_Row: TypeAlias = tuple[int, None, int, int]
"""Leaf, box, offset and bytes of an array in a file."""


def find_losses(source: Source, part: Selection, metadata: Mapping[str, Any]) -> Iterator[forms.Loss]:
    """Yield all that is more than arrays of the dtypes of safetensors by their names."""
    yield from forms.lost_members([name for name, value in metadata.items() if type(value) is not str or name in _OWN])
    yield from forms.lost_containers(part.structure)
    yield from forms.lost_leaves(source, part, lambda kind: forms.refuse_others(kind, DTYPES))
    yield from forms.lost_names(part.keys, _names(forms.key_texts(part.structure)), _is_odd)


def write(source: Source, part: Selection, save: SaveOptions, watch: Watch) -> dict[str, Any]:
    """Write the folder; return what is in it by its keys."""
    leaves = describe_source(source, part)
    names = _names(forms.key_texts(part.structure))
    _write_model(names, leaves, save, watch)
    arrays = [leaves.whole_of(number) for number in range(len(names))]
    return dict(zip((join_key([name]) for name in names), arrays, strict=True))


def _write_model(names: Sequence[str], leaves: DescribedLeaves, options: SaveOptions, watch: Watch) -> None:
    metadata = options.json_metadata()
    kinds = [leaves.types[number] for number in leaves.leaf_types]
    files = _divide(list(map(leaf_bytes, kinds)), _parse_size(options.max_file_size))
    rows = [_place(kinds, numbers) for numbers in files]
    headers = [_header(names, leaves, file, {**_FORMAT, **metadata}) for file in rows]
    total = sum(row[-1] for file in rows for row in file)
    tally = Tally(total, options.progress)
    contents = [_read(leaves, header, file, tally) for header, file in zip(headers, rows, strict=True)]
    contents[-1] = claim_at_end(contents[-1], watch)
    sizes = [len(header) + sum(row[-1] for row in file) for header, file in zip(headers, rows, strict=True)]
    with phase("save/write"), _new_folder(options) as store:
        if len(files) == 1:
            write_file(options.path / _ALONE, contents[0], sizes[0], new=True)
            _require_alone(store, _INDEX, [_ALONE])
            return
        shards = [f"model-{number + 1:05}-of-{len(files):05}.safetensors" for number in range(len(files))]
        weights = {names[leaf]: shard for shard, numbers in zip(shards, files, strict=True) for leaf in numbers}
        index = {"metadata": {**metadata, "total_size": total}, "weight_map": weights}
        _write_shards(store, dict(zip(shards, zip(contents, sizes, strict=True), strict=True)), index)


def _parse_size(given: int | str | None) -> int:
    """Return how many bytes of arrays a file has at most; one larger array has a file of its own.

    Example:
        >>> _parse_size("5GB"), _parse_size("2 MiB"), _parse_size(7), _parse_size(None)
        (5000000000, 2097152, 7, 5000000000)
    """
    found = _SIZE.fullmatch(given) if isinstance(given, str) else None
    size = _FILE_BYTES if given is None else given if type(given) is int else 0
    if found is not None:
        size = int(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper().rjust(1))
    if size < 1:
        raise UnsupportedError(f"max_file_size is {given!r:.100}", hint='pass bytes, or a text such as "5GB"')
    return size


def _names(keys: Iterable[str]) -> list[str]:
    return [".".join(split_key(key)) for key in keys]


def _is_odd(name: str) -> bool:
    return not name or name == "__metadata__" or _SURROGATE.search(name) is not None


def _divide(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Divide arrays among files, in their order.

    Example:
        >>> _divide([4, 4, 9, 1], 8), _divide([], 8)
        ([[0, 1], [2], [3]], [[]])
    """
    files: list[list[int]] = [[]]
    held = 0
    for number, size in enumerate(sizes):
        if files[-1] and held + size > most:
            files.append([])
            held = 0
        files[-1].append(number)
        held += size
    return files


def _place(kinds: Sequence[LeafType], leaves: Sequence[int]) -> list[_Row]:
    """Return where each array of a file lies: large items first, so that all are aligned."""
    rows: list[_Row] = []
    at = 0
    for leaf in sorted(leaves, key=lambda leaf: -itemsize_of(kinds[leaf].dtype)):
        rows.append((leaf, None, at, leaf_bytes(kinds[leaf])))
        at += rows[-1][-1]
    return rows


def _header(names: Sequence[str], leaves: DescribedLeaves, rows: Sequence[_Row], note: Mapping[str, str]) -> bytes:
    header = frame(header_text(names, leaves.types, leaves.leaf_types, rows, note))
    if len(header) - 8 > LARGEST_HEADER:
        hint = "pass a smaller max_file_size"
        raise UnsupportedError(f"a header of {pluralize(len(header), 'bytes')} is too large for readers", hint=hint)
    return header


def _read(leaves: DescribedLeaves, header: bytes, rows: Sequence[_Row], tally: Tally) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file."""
    yield header
    for leaf, *_ in rows:
        array = leaves.whole_of(leaf)
        for block in host_blocks(array, 0, array.size):
            yield block
            tally.add(len(block))


@contextlib.contextmanager
def _new_folder(options: SaveOptions) -> Iterator[Store]:
    """Open the folder, which holds no weights yet; what was made of it goes again if the block fails.

    Raises:
        ExistsError: it holds weights.
    """
    refuse_other_form(options.path, "hf")
    with naming(os.fspath(options.path), "write"), store_at(options.path) as store:
        made = store.transaction().make()
        try:
            store.open()
            _require_no_weights(store)
            yield store
        except BaseException:  # an interrupt too; raised again below
            remove_made(made)
            raise


def _require_no_weights(store: Store) -> None:
    if held := sorted(filter(_WEIGHTS.fullmatch, store.names())):
        why = "such files have fixed names, so no save could replace them as a whole, with overwrite=True neither"
        what = f"{os.fspath(store.path)!r} holds weights: {join_first(held, _SHOWN)}"
        raise ExistsError(what, hint=f"{why}; save to another folder, or remove them")


def _write_shards(store: Store, shards: Mapping[str, tuple[Iterator[bytes | memoryview], int]], index: Any) -> None:
    """Write the files, and once they are durable the index; remove those that were written if one fails."""
    require_space(store.path, sum(size for _, size in shards.values()))
    made: list[str] = []
    try:
        for name, (content, size) in shards.items():
            made.append(name)
            try:
                store.create(name, content, size)
            except FileExistsError:
                made.pop()
                raise _found_another(store, name) from None
        store.flush()
        document = json.dumps(index, indent=2, sort_keys=True) + "\n"
        outcome = store.replace(_INDEX, document.encode(), None)
        if outcome is not Outcome.LOST:
            made.clear()
        _require_done(outcome, store)
        _require_alone(store, _ALONE, [*shards, _INDEX])
        store.flush()
    except BaseException:  # an interrupt too; raised again below
        with contextlib.suppress(OSError):
            store.remove(*made)
        raise


def _require_alone(store: Store, other: str, made: Sequence[str]) -> None:
    """Take back the files that were made where another writer made a model of the other kind meanwhile."""
    if store.find(other) is not None:
        store.remove(*made)
        raise _found_another(store, other)


def _require_done(outcome: Outcome, store: Store) -> None:
    if outcome is Outcome.LOST:
        raise _found_another(store, _INDEX)
    if outcome is Outcome.UNKNOWN:
        raise StoreError(f"whether {_INDEX!r} was written to {os.fspath(store.path)!r} is not known", hint="look there")


def _found_another(store: Store, name: str) -> ExistsError:
    what = f"another program wrote {name!r} to {os.fspath(store.path)!r} meanwhile"
    return ExistsError(what, hint="save to another folder")
