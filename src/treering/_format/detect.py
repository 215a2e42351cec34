"""What a path holds, told by what is there: a checkpoint's folder, safetensors, msgpack, or a form of somebody else."""

from __future__ import annotations

import enum
import os
import re
from pathlib import Path
from typing import Final

from treering._store.checkpoint_names import INDEX
from treering._store.local import LocalFile
from treering.errors import Format, NotFound, Unsupported

__all__ = ["Form", "detect"]

_FIRST_BYTES: Final = 16
_HEADER_PREFIX: Final = 8

# First bytes that each form's specification fixes; no msgpack file that holds anything begins with one of them.
_OTHER_FILES: Final = {
    b"PK\x03\x04": "a zip archive (as .npz files and PyTorch checkpoints are)",
    b"\x93NUMPY": "a .npy file",
    b"\x89HDF\r\n": "an HDF5 file",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
    b"GGUF": "a GGUF file",
    b'{"treering"': "the index of a checkpoint",
    b'{"': "a JSON text",
    b"{\n": "a JSON text",
}
_OTHER_FOLDERS: Final = {
    "tensorstore_index.json": "a folder of TensorStore leaves",
    "_CHECKPOINT_METADATA": "an Orbax checkpoint",
    "_METADATA": "an Orbax checkpoint",
    "manifest.ocdbt": "an OCDBT database, as Orbax writes it",
    ".zgroup": "a zarr group",
    ".zarray": "a zarr array",
    "zarr.json": "zarr",
    "model.safetensors.index.json": "a folder of safetensors files",
    "model.safetensors": "a folder with a safetensors file",
}
_READ_HERE: Final = "treering reads its checkpoints, safetensors, and msgpack, also in gzip form"
# A pathlib.Path has made one slash of the two.
_URL: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")


class Form(enum.Enum):
    """The forms that this version reads."""

    CHECKPOINT = "checkpoint"
    """A folder with a ``treering.json``."""
    SAFETENSORS = "safetensors"
    """One safetensors file, ours or another writer's."""
    MSGPACK = "msgpack"
    """One file on flax's wire."""
    GZIP = "msgpack in gzip"
    """The same in gzip form."""


def detect(path: str | os.PathLike[str]) -> Form:
    r"""Tell which form stands at ``path``. The content decides; its name does only where the content says nothing.

    Raises:
        NotFound: nothing is there, or a folder of some other well-known form. Every other folder is taken for a
            checkpoint, which it is if it has an index.
        Format: a file of some other well-known form, which the message names.
        Unsupported: a URL.
        StoreFailed: not readable.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp(), "a.bin")
        >>> _ = file.write_bytes(b"\x81\xa1a\x01")
        >>> detect(file)
        <Form.MSGPACK: 'msgpack'>
    """
    shown = os.fspath(path)
    if _URL.match(shown):
        raise Unsupported(f"{shown!r} is a URL, and this version reads local paths", hint="copy it here first")
    place = Path(shown)
    if _is_folder(place):
        return _folder(place)
    with LocalFile(place) as file:
        first = file.read(0, min(file.size, _FIRST_BYTES))
        size = file.size
    return _file(shown, first, size)


def _is_folder(place: Path) -> bool:
    try:
        return place.is_dir()
    except (OSError, ValueError):
        # A name that the system cannot even look at: opening it as a file says why.
        return False


def _file(shown: str, first: bytes, size: int) -> Form:
    if first[:2] == b"\x1f\x8b":
        return Form.GZIP
    # The length of a JSON header, little-endian in eight bytes, then that header.
    header = int.from_bytes(first[:_HEADER_PREFIX], "little")
    if first[_HEADER_PREFIX : _HEADER_PREFIX + 1] == b"{" and first[6:8] == b"\0\0":
        return Form.SAFETENSORS
    if shown.endswith(".safetensors") and (size < _HEADER_PREFIX or not header or header > size - _HEADER_PREFIX):
        # Damaged, and its reader says how.
        return Form.SAFETENSORS
    for magic, other in _OTHER_FILES.items():
        if first.startswith(magic):
            hint = "give the folder that it is in" if magic == b'{"treering"' else _READ_HERE
            raise Format(f"{shown!r} is {other}, not msgpack", hint=hint)
    return Form.SAFETENSORS if shown.endswith(".safetensors") else Form.MSGPACK


def _folder(place: Path) -> Form:
    if not os.path.lexists(place / INDEX):
        for name, other in _OTHER_FOLDERS.items():
            if os.path.lexists(place / name):
                raise NotFound(f"there is no checkpoint in {os.fspath(place)!r}: it is {other}", hint=_READ_HERE)
    # Where there is none at all, opening it says what is there instead.
    return Form.CHECKPOINT
