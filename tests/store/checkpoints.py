"""Small checkpoints whose index is a list of names, and what is found of them."""

import json
from collections.abc import Sequence
from pathlib import Path

from treering._checkpoint.transaction import CheckpointFolder
from treering._store.open_folder import OpenFolder
from treering.errors import Corrupt


def names_in(index: bytes) -> Sequence[str]:
    """All names of an index of these tests: the files, then what they replace."""
    try:
        files, replaces = json.loads(index)
    except ValueError as error:
        raise Corrupt(f"no index: {error}") from error
    return [*files, *replaces]


def folder_at(path: Path, *, overwrite: bool = False) -> CheckpointFolder:
    return CheckpointFolder(path, overwrite=overwrite, names_in=names_in)


def write(saving: CheckpointFolder, payload: bytes) -> bytes:
    """Write the payload in two data files and return the index of them."""
    files = [f"data-{saving.attempt}-{n:05}-of-00002.safetensors" for n in range(2)]
    half = len(payload) // 2
    saving.require_space(len(payload))
    saving.write_file(files[0], [payload[:half]], half)
    saving.write_file(files[1], [payload[half:]], len(payload) - half)
    return json.dumps([files, saving.superseded]).encode()


def save(path: Path, payload: bytes, *, overwrite: bool = False) -> str:
    """Save the payload and return the attempt."""
    with folder_at(path, overwrite=overwrite) as saving:
        saving.commit(write(saving, payload))
    return saving.attempt


def load(path: Path) -> bytes:
    """Return the payload that is saved at ``path``."""
    with OpenFolder(path) as folder:
        files = folder.open_files(json.loads(folder.read_index())[0])
        parts = [file.read(0, file.size) for file in files.values()]
        for file in files.values():
            file.close()
    return b"".join(parts)


def data_names(attempt: str) -> list[str]:
    return [f"data-{attempt}-{n:05}-of-00002.safetensors" for n in range(2)]


def journal_name(attempt: str) -> str:
    return f".treering.json.{attempt}.treering-tmp"


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
