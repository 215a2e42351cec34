"""Hugging Face folders: safetensors shards with their ``*.safetensors.index.json``, or ``model.safetensors`` alone.

Source: https://huggingface.co/docs/safetensors, and ``save_pretrained`` of transformers. In a snapshot of the hub's
cache the files are links into its ``blobs`` folder; the store follows these and no others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from treering._codec.documents import add_hint, decode_text, member
from treering._foreign.foreign_tree import ForeignLeaf, ForeignTree, build_index, flat_dict
from treering._format.index import Container, DataFile, Index
from treering._format.safetensors import parse_safetensors
from treering._store.api import Reader, Store
from treering._store.failures import naming, naming_file
from treering._store.resolve import is_folder, opened_store
from treering._values.human import join_first, pluralize
from treering.errors import CorruptError, NotFoundError

_INDEX: Final = ".safetensors.index.json"
# A variant stands before the last suffix.
_ANY_INDEX: Final = re.compile(r".*\.safetensors\.index(\.\w+)?\.json")
_ALONE: Final = "model.safetensors"
_USUAL: Final = f"model{_INDEX}"
_CONFIG: Final = "config.json"
_LARGEST_INDEX: Final = 64 << 20
_LARGEST_CONFIG: Final = 4 << 20
_SHOWN: Final = 3
_OUTSIDE: Final = frozenset("/\\\0:")
_DOWNLOAD: Final = "download or copy the folder again, every file that its index names"
# What models tie to their input embedding, which has one of these names too.
_TIED: Final = frozenset(
    {"lm_head", "embed_out", "embed_tokens", "shared", "wte", "output", "decoder", "word_embeddings"}
)


def recognise(place: Path) -> str | None:
    """Detect a Hugging Face folder, of shards with an index or of one file; or such an index, by its name."""
    if _ANY_INDEX.fullmatch(place.name):
        return f"Hugging Face, shards by {place.name}"
    if not is_folder(place):
        return None
    with naming(os.fspath(place), "read"), opened_store(place) as store:
        name = _find_index(store)
    return f"Hugging Face, {_ALONE}" if name is None else f"Hugging Face, shards by {name}"


def open_foreign(place: Path, files: contextlib.ExitStack) -> ForeignTree:
    """Open a folder, or the index in one, as a flat dict of arrays by their names.

    Raises:
        NotFoundError: there is no file that holds arrays.
        CorruptError: a file is damaged or missing, or index and files do not name the same tensors.
        FormatError: a file is a link that leads out of the folder, or out of the hub's cache that it is in.
        UnsupportedError: an array is of a dtype that has no form here.
        StoreError: the store refuses.
    """
    folder = place if is_folder(place) else place.parent
    with naming(os.fspath(folder), "read"), opened_store(folder) as store:
        name = _find_index(store) if folder == place else place.name
        config: dict[str, Any] = {}
        with contextlib.suppress(CorruptError, NotFoundError):  # the arrays do not need it
            config = _read_json(store, _CONFIG, _LARGEST_CONFIG)
        if name is None:
            return _open_alone(store, config, files)
        with naming_file(folder / name), add_hint(_DOWNLOAD):
            document = _read_json(store, name, _LARGEST_INDEX)
            weights = _read_weights(document)
        shards = _open_shards(store, name, weights, files)
    return _join(folder / name, weights, shards, config, document.get("metadata"))


def _find_index(store: Store) -> str | None:
    """Return the name of the index in a folder, the usual one or the only one; None for one file, which comes first."""
    if store.find(_ALONE) is not None:
        return None
    if store.find(_USUAL) is not None:
        return _USUAL
    found = sorted(name for name in store.names() if name.endswith(_INDEX))
    if len(found) > 1:
        what = f"{os.fspath(store.path)!r} has {len(found)} indexes: {join_first(found, _SHOWN)}"
        raise NotFoundError(what, hint="pass the path of one of them")
    return found[0] if found else None


def _read_json(store: Store, name: str, most: int) -> dict[str, Any]:
    with store.open_file(name) as file:
        if file.size > most:
            raise CorruptError(f"{name} has {pluralize(file.size, 'bytes')}, more than {most}")
        text = decode_text(file.read(0, file.size), name)
    try:
        found = json.loads(text)  # of a name that is there twice the last one counts: the files say if it is right
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{name} is not JSON: {error}") from None
    if type(found) is not dict:
        raise CorruptError(f"{name} is not a JSON object")
    return found


def _read_weights(document: dict[str, Any]) -> dict[str, str]:
    """Return which file holds each tensor."""
    weights = member(document, "weight_map", dict, "the index")
    for name, file in weights.items():
        if type(file) is not str or not _OUTSIDE.isdisjoint(file) or not file.endswith(".safetensors"):
            what = "which is no safetensors file beside it"
            raise CorruptError(f"it names {file!r:.200} for the tensor {name!r:.200}, {what}")
    return weights


def _open_shards(
    store: Store, index: str, weights: Mapping[str, str], files: contextlib.ExitStack
) -> dict[str, tuple[Reader, Index]]:
    """Open every file that the index names, in the order of their names."""
    shards: dict[str, tuple[Reader, Index]] = {}
    for name in sorted(set(weights.values())):
        try:
            shards[name] = _open_shard(store, name, files)
        except NotFoundError:
            lost = [tensor for tensor, file in weights.items() if file == name]
            what = f"{name!r} is missing in {os.fspath(store.path)!r}: {index} names it for {_some(lost)}"
            raise CorruptError(what, hint=_DOWNLOAD) from None
    return shards


def _open_shard(store: Store, name: str, files: contextlib.ExitStack) -> tuple[Reader, Index]:
    file = files.enter_context(store.open_file(name))
    with naming_file(Path(store.path / name)):
        return file, parse_safetensors(file.size, file.read)


def _open_alone(store: Store, config: Mapping[str, Any], files: contextlib.ExitStack) -> ForeignTree:
    file, index = _open_shard(store, _ALONE, files)
    index = dataclasses.replace(index, metadata={**index.metadata, **_describe(config)})
    notes = [] if store.find(_USUAL) is None else [f"transformers reads {_ALONE}, not {_USUAL}, which is there too"]
    return ForeignTree(
        index=index, files=[file], nbytes=file.size, notes=notes, structured=index.verified, threads=file.threads
    )


def _join(
    index: Path,
    weights: Mapping[str, str],
    shards: Mapping[str, tuple[Reader, Index]],
    config: Mapping[str, Any],
    about: Any,
) -> ForeignTree:
    """Put the shards together as one tree: those tensors that the index names, each from the file that it names."""
    found: dict[str, ForeignLeaf] = {}
    twice: list[str] = []
    where = repr(os.fspath(index.parent))
    for number, (shard, (_, part)) in enumerate(shards.items()):
        head = part.structure[0]
        # A file that treering wrote has key texts as names.
        names = head.keys if isinstance(head, Container) and not part.verified else part.keys
        for row, leaf in enumerate(part.chunks.leaf):
            name = names[leaf]
            if name not in weights:
                what = f"{shard!r} holds the tensor {name!r:.200}, which {index.name!r} does not name, in {where}"
                raise CorruptError(what, hint=f"load the file alone, or {_DOWNLOAD}")
            if weights[name] != shard:
                twice.append(name)
                continue
            found[name] = ForeignLeaf(part.type_of(leaf), pieces=[(None, number, part.chunks.offset[row])])
    ties = _find_ties(weights, found, shards, config)
    if lost := [name for name in weights if name not in found and name not in ties]:
        what = f"{index.name!r} names {_some(lost)} in {weights[lost[0]]!r}, which does not hold it, in {where}"
        raise CorruptError(what, hint=_DOWNLOAD)
    structure, keys = flat_dict(list(found))
    rows = [
        DataFile(name=name, nbytes=file.size, header=part.files[0].header, digest=None)
        for name, (file, part) in shards.items()
    ]
    told = {name: value for name, value in about.items() if type(value) in (int, str)} if type(about) is dict else {}
    left = {"tied to others, and in no file": ties, "in several files, read from the one that the index names": twice}
    readers = [file for file, _ in shards.values()]
    return ForeignTree(
        index=build_index(structure, keys, list(found.values()), rows, {**told, **_describe(config)}),
        files=readers,
        nbytes=sum(file.size for file in readers),
        notes=[f"{what}: {join_first(names, _SHOWN)}" for what, names in left.items() if names],
        threads=max((file.threads for file in readers), default=Reader.threads),
    )


def _find_ties(
    weights: Mapping[str, str],
    found: Mapping[str, ForeignLeaf],
    shards: Mapping[str, tuple[Reader, Index]],
    config: Mapping[str, Any],
) -> list[str]:
    """Return the tensors that are others of the model under a second name, so that no file has to hold them."""
    kept = {name: of for _, part in shards.values() for name, of in part.metadata.items()}
    tied = config.get("tie_word_embeddings") is True
    return [
        name
        for name in weights
        if name not in found and (kept.get(name) in found or (tied and not _TIED.isdisjoint(name.split("."))))
    ]


def _describe(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the configuration says of the model, as metadata."""
    names, kind = config.get("architectures"), config.get("model_type")
    architectures = [name for name in names if type(name) is str] if type(names) is list else []
    told = {"architectures": architectures, "model_type": kind if type(kind) is str else None}
    return {name: value for name, value in told.items() if value not in (None, [])}


def _some(names: Sequence[str]) -> str:
    return f"the tensor {names[0]!r:.200}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
