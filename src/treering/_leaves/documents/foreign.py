r"""A record for a branch that another program wrote: arrays in nested dicts, without checksums.

The leaves that are no arrays stand in eformer's ``PREFIX_structure.json``, not in its index. Tree and values are
pickles there, and nothing is unpickled. The keys of the leaves say the structure. Of the values those are known whose
bytes have one of a few fixed forms: None, truth values, numbers and short texts.

Source: ``save_pytree`` of eformer 0.0.101; ``pickletools`` of Python for the forms.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import re
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from treering._codec.documents import check_hashes, check_texts, decode_text, member, parse_json
from treering._codec.zarr import ZarrArray
from treering._format.index import MAX_LEVELS, LeafType, OpaqueLeaf
from treering._format.leaf_values import check_shape
from treering._format.structure import Nested, flatten_nested
from treering._leaves.documents.index import LEAVES_INDEX, Entry
from treering._leaves.documents.record import ChunkLayout, LeavesRecord, OpenBranch, arrays_of, parts_of_folder
from treering._store.failures import naming_file
from treering._store.leaves_api import OpenLeaves
from treering._values.human import pluralize
from treering._values.keys import join_key
from treering.errors import CorruptError, DataFileMissingError, UnsupportedError


class OtherLeaf(NamedTuple):
    """A leaf of a branch that is no array."""

    path: str
    """Where its folder would be."""
    type: LeafType
    """What it is."""
    value: Any
    """Its value."""


def foreign_record(
    prefix: str | None, entries: Sequence[Entry], arrays: Sequence[ZarrArray], others: Sequence[OtherLeaf] = ()
) -> LeavesRecord:
    """Return a made up record: nested dicts of jax arrays, in the order of the entries as far as dicts allow.

    Its attempt is ``UNMARKED``, it has no checksums, and `arrays_of` gives the arrays back in the order of its leaves.

    Args:
        prefix: the branch's.
        entries: of the branch.
        arrays: what the ``.zarray`` of each entry says.
        others: leaves that are no arrays.

    Raises:
        CorruptError: two entries have one folder, or one lies in the other: a leaf was lost when they were written.
        UnsupportedError: an array is larger than any memory, or keys are nested too deep.

    Example:
        >>> entries = [Entry("a/w", {}), Entry("b", {}), Entry("a/x", {})]
        >>> record = foreign_record(None, entries, [ZarrArray(shape=(2,), chunks=(2,), dtype="int8")] * 3)
        >>> record.keys, record.folders
        (['a/w', 'a/x', 'b'], ['a/w', 'a/x', 'b'])
    """
    listed = [*entries, *(Entry(other.path, {}) for other in others)]
    nested, all_paths = _nest(prefix, listed)
    structure, found = flatten_nested(nested)
    paths = [all_paths[number] for number in found]
    check_hashes([this.shape for this in arrays], "the shapes of the arrays")
    check_hashes([this.chunks for this in arrays], "the chunks of the arrays")
    types: dict[LeafType, int] = {}
    layouts: dict[ChunkLayout, int] = {}
    leaf_types: list[int] = []
    leaf_layouts: list[int] = []
    known: dict[int, tuple[int, int]] = {}
    values: dict[int, Any] = {}
    for number, path in zip(found, paths, strict=True):
        if number >= len(arrays):
            other = others[number - len(arrays)]
            values[len(leaf_types)] = other.value
            leaf_types.append(types.setdefault(other.type, len(types)))
            continue
        this = arrays[number]
        if id(this) not in known:
            kind, layout = _describe(this, path)
            known[id(this)] = types.setdefault(kind, len(types)), layouts.setdefault(layout, len(layouts))
        leaf_types.append(known[id(this)][0])
        leaf_layouts.append(known[id(this)][1])
    return LeavesRecord(
        prefix=prefix,
        structure=structure,
        keys=list(map(join_key, paths)),
        types=list(types),
        leaf_types=leaf_types,
        values=values,
        folders=[entries[number].path for number in found if number < len(entries)],
        layouts=list(layouts),
        leaf_layouts=leaf_layouts,
    )


def _describe(this: ZarrArray, path: tuple[str, ...]) -> tuple[LeafType, ChunkLayout]:
    try:
        shape = check_shape(list(this.shape), this.dtype, "the array")
    except (CorruptError, UnsupportedError) as error:
        error.path = path
        raise
    layout = {field.name: getattr(this, field.name) for field in dataclasses.fields(ChunkLayout)}
    return LeafType(kind="jax", dtype=this.dtype, shape=shape), ChunkLayout(**layout)


def _nest(prefix: str | None, entries: Sequence[Entry]) -> tuple[Nested, list[tuple[str, ...]]]:
    """Return the numbers of the entries in nested dicts, inside one more dict, and the path of each entry."""
    root: Nested = {}
    paths: list[tuple[str, ...]] = []
    for number, (path, _) in enumerate(entries):
        paths.append(parts_of_folder(path, prefix) if path else ())
        # Below a root of one key, so that a bare array has a place.
        parts = ("", *paths[-1])
        if len(parts) > MAX_LEVELS:
            raise UnsupportedError(f"the path {path[:200]!r} is more than {MAX_LEVELS} folders deep")
        node = root
        for part in parts[:-1]:
            inner = node.setdefault(part, {})
            if isinstance(inner, int):
                raise _clash_error(path, entries[inner].path)
            node = inner
        there = node.setdefault(parts[-1], number)
        if there != number:
            raise _clash_error(path, path if isinstance(there, dict) else entries[there].path)
    return root, paths


def _clash_error(one: str, other: str) -> CorruptError:
    return CorruptError(
        f"{LEAVES_INDEX} lists an array in {one[:200] or '.'!r} and another one in {other[:200] or '.'!r} or below",
        hint="two keys were saved to one folder, and one of the arrays is lost: save them again under other keys",
    )


_LARGEST: Final = 64 << 20
_PICKLE: Final = re.compile(
    rb"\x80[\x04\x05](?:\x95.{8})?(?:\x8c(?P<size>.)(?P<text>.*)\x94|(?P<form>[NKMJG\x88\x89])(?P<data>.*))\.",
    re.DOTALL,
)
_CONSTANTS: Final = {b"N": ("none", None), b"\x88": ("bool", True), b"\x89": ("bool", False)}
_NUMBERS: Final = {b"K": ("int", "<B"), b"M": ("int", "<H"), b"J": ("int", "<i"), b"G": ("float", ">d")}


def add_structure(folder: OpenLeaves, branch: OpenBranch) -> OpenBranch:
    """Return a branch with the leaves that are no arrays, where another program's structure file lists them.

    A file that does not list the arrays of the index is one of another save, and says nothing of this one.

    Raises:
        CorruptError: the file is damaged.
        LinkRefusedError: it is a link.
        StoreError: the system refuses.
    """
    record = branch.record
    if branch.verified or record.prefix is None:
        return branch
    above, _, name = f"{record.prefix}_structure.json".rpartition("/")
    try:
        with folder.open(above, name, None) as file:
            if file.size > _LARGEST:
                raise CorruptError(f"{name!r} has {pluralize(file.size, 'bytes')}, more than any tree needs")
            data = file.read(0, file.size)
    except DataFileMissingError:
        return branch
    with naming_file(folder.path / above / name):
        document = parse_json(decode_text(data, name), name)
        if type(document) is not dict or document.get("format") != "pytree-structure":
            return branch
        if sorted(_texts(document, "array_relpaths")) != sorted(record.folders):
            return branch
        entries = [Entry(path, {}) for path in record.folders]
        made = foreign_record(record.prefix, entries, branch.arrays, _other_leaves(document))
        written = {"by": f"eformer {document.get('version')!s:.100}"}
        made = dataclasses.replace(made, written=written, metadata=member(document, "extras", dict, name))
    return dataclasses.replace(branch, record=made, arrays=arrays_of(made))


def _other_leaves(document: dict[str, Any]) -> list[OtherLeaf]:
    keys, mask = _texts(document, "leaf_keys_full"), member(document, "arr_mask", list, "it")
    payload = member(document, "nonarray_payload", dict, "it")
    if len(mask) != len(keys) or not all(type(one) is bool for one in mask):
        raise CorruptError(f"arr_mask does not say of {pluralize(len(keys), 'leaves')} which are arrays")
    others = []
    for number, key in enumerate(keys):
        if not mask[number]:
            kind, value = _read_pickle(member(payload, str(number), str, "nonarray_payload"))
            others.append(OtherLeaf(key.replace(".", "/"), LeafType(kind=kind), value))
    return others


def _texts(document: dict[str, Any], name: str) -> list[str]:
    return check_texts(member(document, name, list, "it"), name)


def _read_pickle(text: str) -> tuple[str, Any]:
    """Return kind and value of a leaf, if its bytes have one of the known forms; else what stands for it.

    Example:
        >>> _read_pickle("gAROLg=="), _read_pickle("gARLBy4=")
        (('none', None), ('int', 7))
        >>> _read_pickle("gARdlC4=")
        ('opaque', OpaqueLeaf(class_name='pickle', text='5 bytes, which treering does not unpickle'))
    """
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error:
        raise CorruptError(f"the text {text!r:.60} is not base64") from None
    if (found := _PICKLE.fullmatch(data)) is not None:
        form, bits = found["form"], found["data"]
        if form in _CONSTANTS and not bits:
            return _CONSTANTS[form]
        if form in _NUMBERS and len(bits) == struct.calcsize(_NUMBERS[form][1]):
            kind, layout = _NUMBERS[form]
            return kind, struct.unpack(layout, bits)[0]
        if form is None and len(found["text"]) == found["size"][0]:
            return "str", decode_text(found["text"], "a text")
    return "opaque", OpaqueLeaf("pickle", f"{pluralize(len(data), 'bytes')}, which treering does not unpickle")
