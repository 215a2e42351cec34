"""Small checkpoints and runs of them whose index is a list of names, and what is found of them."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from tests.on_disk import step_path
from treering._checkpoint.transaction import CheckpointFolder, JoinedFolder, refusing_board
from treering._coordination.message_board import MessageBoard
from treering._runs.folder import RunFolder
from treering._runs.gc import remove_step, tidy_step
from treering._store.open_folder import OpenFolder
from treering.errors import CorruptError


def names_in(index: bytes) -> Sequence[str]:
    """All names of an index of these tests: the files, then what they replace."""
    try:
        files, replaces = json.loads(index)
    except ValueError as error:
        raise CorruptError(f"no index: {error}") from error
    return [*files, *replaces]


def attempt_of(index: bytes) -> str:
    """The attempt of an index of these tests."""
    return json.loads(index)[0][0].split("-")[1]


def folder_at(
    path: Path,
    *,
    overwrite: bool = False,
    attempt: str | None = None,
    names_in: Callable[[bytes], Sequence[str]] = names_in,
) -> CheckpointFolder:
    return CheckpointFolder(path, overwrite=overwrite, names_in=names_in, attempt=attempt)


def join(path: Path, attempt: str) -> JoinedFolder:
    """Take part in the save of another process."""
    return JoinedFolder(path, attempt)


def refuse(path: Path) -> AbstractContextManager[MessageBoard]:
    """Return the board of a folder that process 0 could not enter."""
    return refusing_board(path)


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


# ---------------------------------------------------------------------------------------------------------------- runs


def save_step(run: Path, step: int, payload: bytes) -> str:
    """Save the payload as a step and return the attempt."""
    return save(step_path(run, step), payload)


def steps_of(run: Path) -> list[int]:
    with RunFolder(run) as folder:
        return folder.steps()


def remove(run: Path, step: int, attempt_of: Callable[[bytes], str | None] = attempt_of) -> bool:
    """Remove a step."""
    with RunFolder(run) as folder:
        return remove_step(folder, step, names_in, attempt_of)


def tidy(run: Path, *steps: int, newest: bool = True) -> None:
    """Finish in these steps, in all if none is named, what others did not."""
    with RunFolder(run) as folder:
        for step in steps or folder.folders():
            tidy_step(folder, step, names_in, newest=newest)
