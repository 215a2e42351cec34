"""Every byte of a leaves directory compared with its records; jax is not needed for it."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from treering._arrays.jobs import Progress, Tally, Work, run_all
from treering._format.findings import Finding, Verification
from treering._inspect.verify_chunks import ChunkCheck, Findings, LeafFiles
from treering._inspect.verify_reading import check_reading
from treering._leaves.branches import TRIES, is_unchanged, judge_branch, replaced_too_often
from treering._leaves.documents.index import LEAVES_INDEX, IndexBranch, parse_leaves_index
from treering._leaves.documents.record import OpenBranch, first_checksums, stored_leaves
from treering._leaves.listing import describe_state
from treering._leaves.source import LeavesSource
from treering._store.failures import LinkRefused
from treering._store.leaves_folder.leaves_folder import LeavesFolder
from treering._values.human import join_first
from treering._values.leaves_names import ZARRAY
from treering.errors import Corrupt

_SHOWN: Final = 8
_UNCHECKED: Final = "was written by another program and has no checksums, so its arrays were not checked"


def verify_leaves(path: str | os.PathLike[str], progress: Progress | None) -> Verification:
    """Check the index, every record, ``.zarray`` and chunk file; `treering.verify` says more.

    Raises:
        NotFound: there is no index.
        Format, Unsupported: the index or a record is of another format, a newer version, or has an unknown dtype.
        Busy: the directory was saved anew again and again.
        StoreFailed: the system refuses to read the directory or the index.
    """
    shown = os.fspath(path)
    with LeavesFolder(Path(path)) as folder:
        for _ in range(TRIES):
            try:
                read = list(parse_leaves_index(folder.read_index()).branches.values())
            except (Corrupt, LinkRefused) as error:
                return _broken(folder, shown, error)
            found = _checked(folder, shown, read, progress)
            # What is missing or has other bytes may be what a save replaced meanwhile.
            if (found.ok and found.checked) or is_unchanged(folder, read):
                return found
        raise replaced_too_often(folder)


def _broken(folder: LeavesFolder, path: str, error: Corrupt | LinkRefused) -> Verification:
    return Verification(path=path, findings=(_index_finding(folder, error),), leaves=0, nbytes=0, checked=True)


def _index_finding(folder: LeavesFolder, error: Corrupt | LinkRefused) -> Finding:
    """Say what is wrong with the index, without its name, which the finding has."""
    shown = repr(os.fspath(folder.path / LEAVES_INDEX))
    reason = error.message
    for known in (f"{shown}: ", f"{shown} is damaged: ", f"{LEAVES_INDEX} is damaged: "):
        reason = reason.removeprefix(known)
    problem = f"is damaged ({reason})" if isinstance(error, Corrupt) else f"cannot be read ({error})"
    return Finding(key=None, file=LEAVES_INDEX, start=error.offset, stop=None, problem=problem)


def _checked(folder: LeavesFolder, path: str, read: Sequence[IndexBranch], progress: Progress | None) -> Verification:
    """Check one state of the index and everything that it names."""
    broken: list[Finding] = []
    branches: list[OpenBranch] = []
    for branch in read:
        try:
            branches.append(judge_branch(folder, branch))
        except Corrupt as error:
            broken.append(_branch_finding(folder, error))
    try:
        source = LeavesSource(folder, branches, read)
    except Corrupt as error:
        return _broken(folder, path, error)
    findings = Findings()
    leaves = list(_stored(source))
    nbytes = _check_files(ChunkCheck(folder, findings), leaves, progress)
    known = findings.leaves()
    for leaf in leaves:
        if leaf.leaf not in known:
            check_reading(source, leaf, findings)
    unchecked = [branch.record.prefix for branch in branches if not branch.verified]
    notes = describe_state(folder, read)
    if unchecked:
        notes.insert(0, _unchecked_note(unchecked, len(read)))
    return Verification(
        path=path,
        findings=(*broken, *findings),
        leaves=len(source.index.keys),
        nbytes=nbytes,
        checked=not unchecked,
        note="; ".join(notes) or None,
    )


def _branch_finding(folder: LeavesFolder, error: Corrupt) -> Finding:
    """Say what is wrong with a branch as a whole: with its record, or with a ``.zarray`` of another program."""
    if error.path is None:
        return _index_finding(folder, error)
    file = "/".join((*error.path, ZARRAY))
    return Finding(key=None, file=file, start=error.offset, stop=None, problem=f"is damaged ({error.message})")


def _unchecked_note(prefixes: Sequence[str | None], branches: int) -> str:
    if len(prefixes) == branches:
        return f"it {_UNCHECKED}"
    shown = join_first(["no prefix" if prefix is None else repr(prefix) for prefix in prefixes], _SHOWN)
    return f"what is under {shown} {_UNCHECKED}; everything else was checked"


def _stored(source: LeavesSource) -> Iterator[LeafFiles]:
    """Walk through the stored leaves of all branches, which follow each other in the source's index."""
    numbers = iter(stored_leaves(source.index))
    for branch in source.branches:
        files = zip(branch.record.folders, branch.arrays, branch.chunk_sizes(), strict=True)
        for (folder, zarr, sizes), first in zip(files, first_checksums(branch.record), strict=False):
            leaf = next(numbers)
            key = source.index.keys[leaf]
            yield LeafFiles(leaf=leaf, key=key, folder=folder, zarr=zarr, branch=branch, sizes=sizes, first=first)


def _check_files(check: ChunkCheck, leaves: Sequence[LeafFiles], progress: Progress | None) -> int:
    """Compare the files of all leaves that a record describes, large ones in two threads; return how many bytes."""
    small, large = Work(), Work()
    for leaf in leaves:
        if leaf.is_small:
            small.jobs.append(functools.partial(check.check_small, leaf))
            small.nbytes += leaf.sizes[0]
        elif leaf.branch.verified:
            large.jobs.extend(check.jobs(leaf))
            large.nbytes += sum(leaf.sizes)
    total = small.nbytes + large.nbytes
    run_all(large, Tally(total, progress), small)
    return total
