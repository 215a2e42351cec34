r"""eformer's ``PREFIX_structure.json``: the leaves of a tree that are no arrays, which its index does not list.

Tree and values are pickles there, and nothing is unpickled. The keys of the leaves say the structure. Of the values
those are known whose bytes have one of a few fixed forms: None, truth values, numbers and short texts.

Source: ``save_pytree`` of eformer 0.0.101; ``pickletools`` of Python for the forms.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import re
import struct
from typing import Any, Final

from treering._codec.documents import check_texts, decode_text, member, parse_json
from treering._format.index import LeafType, OpaqueLeaf
from treering._leaves.documents.foreign import OtherLeaf, foreign_record
from treering._leaves.documents.index import Entry
from treering._leaves.documents.record import OpenBranch, arrays_of
from treering._store.failures import DataFileMissing, naming_file
from treering._store.leaves_folder.open_leaves import OpenLeaves
from treering._values.human import pluralize
from treering.errors import Corrupt

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
        Corrupt: the file is damaged.
        LinkRefused: it is a link.
        StoreFailed: the system refuses.
    """
    record = branch.record
    if branch.verified or record.prefix is None:
        return branch
    above, _, name = f"{record.prefix}_structure.json".rpartition("/")
    try:
        with folder.open(above, name, None) as file:
            if file.size > _LARGEST:
                raise Corrupt(f"{name!r} has {pluralize(file.size, 'bytes')}, more than any tree needs")
            data = file.read(0, file.size)
    except DataFileMissing:
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
        raise Corrupt(f"arr_mask does not say of {pluralize(len(keys), 'leaves')} which are arrays")
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
        raise Corrupt(f"the text {text!r:.60} is not base64") from None
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
