"""Does an index still have all its files, as large as it says? None of them is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from treering._codec.leaves_key import find_attempts
from treering._codec.zarr import chunk_name, zarray_bytes
from treering._format.diagnosis import Committed
from treering._format.document import parse_index
from treering._format.index import Index
from treering._inspect.doctor_attempts import Known
from treering._leaves.branches import judge_branch
from treering._leaves.documents.index import LEAVES_INDEX, parse_leaves_index
from treering._leaves.documents.record import OpenBranch
from treering._leaves.documents.update import unfinished_update
from treering._store.failures import LinkRefused, naming_file
from treering._store.leaves_folder.open_leaves import OpenLeaves
from treering._store.leaves_places import open_leaves
from treering._store.open_folder import OpenFolder
from treering._store.resolve import located
from treering._values.checkpoint_names import INDEX
from treering._values.human import pluralize
from treering._values.leaves_names import ZARRAY
from treering.errors import Corrupt, Format, NotFound, StoreFailed, TreeringError, Unsupported

_BROKEN: Final = (Corrupt, Format, Unsupported)

State = tuple[Committed | None, Known, list[str]]
"""What is committed, what its index names, and what is wrong."""


def checkpoint_state(path: str) -> State:
    """Look at the checkpoint in a folder, which has an index.

    Raises:
        StoreFailed: the system refuses to read the index.
    """
    with OpenFolder(located(path)) as folder:
        try:
            data = folder.read_index()
            with naming_file(located(path) / INDEX):
                index = parse_index(data)
        except _BROKEN as error:
            return None, Known(damaged=True), [f"the index cannot be used: {error}"]
        problems = list(_checkpoint_problems(folder, index))
    known = Known(files={file.name for file in index.files}, replaced=set(index.replaces), attempts={index.attempt})
    size = len(data) + sum(file.nbytes for file in index.files)
    counts = {"processes": index.processes, "files": 1 + len(index.files), "nbytes": size}
    return _committed("checkpoint", known, index.written, **counts), known, problems


def _checkpoint_problems(folder: OpenFolder, index: Index) -> Iterator[str]:
    for file in index.files:
        whose = "" if file.process is None else f", which process {file.process} wrote,"
        try:
            with folder.open_files([file.name])[file.name] as opened:
                if opened.size != file.nbytes:
                    size = f"{pluralize(opened.size, 'bytes')} instead of {file.nbytes}"
                    yield f"{file.name}{whose} has {size}; use another copy"
        except NotFound:
            yield f"{file.name}{whose} is missing; use another copy of the checkpoint"
        except (LinkRefused, Corrupt, StoreFailed) as error:
            yield str(error)


def leaves_state(path: str) -> State:
    """Look at a leaves directory, which has an index.

    Raises:
        StoreFailed: the system refuses to read the index.
    """
    with open_leaves(path) as folder:
        try:
            data = folder.read_index()
            with naming_file(located(path) / LEAVES_INDEX):
                index = parse_leaves_index(data)
        except _BROKEN as error:
            return None, Known(damaged=True), [f"the index cannot be used: {error}"]
        problems: list[str] = []
        branches: list[OpenBranch] = []
        for branch in index.branches.values():
            try:
                branches.append(judge_branch(folder, branch))
            except TreeringError as error:
                problems.append(str(error))
        size, files = len(data), 1
        for each in branches:
            for name, nbytes, problem in _leaf_files(folder, each):
                files += 1
                size += nbytes
                if problem is not None:
                    problems.append(f"{name} {problem}; use another copy of the directory")
    unfinished = unfinished_update(data)
    moving = {move.attempt for move in unfinished.moves} if unfinished is not None else set()
    known = Known(attempts=find_attempts(data), moving=moving)
    written = max((each.record.written for each in branches), key=lambda one: str(one.get("at", "")), default={})
    processes = written.get("processes")
    counts = {"processes": processes if type(processes) is int and processes > 0 else 1, "files": files, "nbytes": size}
    return _committed("leaves", known, written, **counts), known, problems


def _leaf_files(folder: OpenLeaves, branch: OpenBranch) -> Iterator[tuple[str, int, str | None]]:
    """Walk through the files of a branch with their sizes, and what is wrong with them.

    Other programs may leave out chunks that are full of one value, and no record says how large theirs are.
    """
    for name, array, sizes in zip(branch.record.folders, branch.arrays, branch.chunk_sizes(), strict=True):
        wanted = [(ZARRAY, len(zarray_bytes(array)))] if branch.verified else []
        wanted += [(chunk_name(array, number), nbytes) for number, nbytes in enumerate(sizes)]
        for file, nbytes in wanted:
            yield f"{name}/{file}".removeprefix("/"), nbytes, _problem(folder, branch, (name, file), nbytes)


def _problem(folder: OpenLeaves, branch: OpenBranch, place: tuple[str, str], nbytes: int) -> str | None:
    try:
        with folder.open(*place, branch.attempt) as opened:
            return None if opened.size == nbytes else f"has {pluralize(opened.size, 'bytes')} instead of {nbytes}"
    except NotFound:
        return "is missing"
    except (LinkRefused, Corrupt, StoreFailed) as error:
        return f"cannot be opened ({error})"


def _committed(form: str, known: Known, written: Mapping[str, object], **counts: int) -> Committed:
    at, by = (text if isinstance(text, str) else None for text in (written.get("at"), written.get("by")))
    return Committed(form=form, attempts=sorted(known.attempts), at=at, by=by, **counts)
