"""Every step of a run compared with its checksums; jax is not needed for it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from treering._format.findings import Finding, Verification
from treering._runs.listing_cache import cache_trouble
from treering._runs.steps import records_of, step_path, steps_of
from treering.errors import NotFound

Progress: TypeAlias = Callable[[int, int], object]
Check: TypeAlias = Callable[[Path, Progress | None], Verification]


def verify_run(path: str | os.PathLike[str], progress: Progress | None, check: Check) -> Verification:
    """Check every step of a run; files are named with the folder of their step.

    Args:
        path: the run's folder.
        progress: called as ``progress(done, total)``, in bytes.
        check: what checks one checkpoint.

    Raises:
        Format, Unsupported: a step is of a version or a dtype that this version does not read.
        StoreFailed: the system refuses.
    """
    place = Path(path)
    records = records_of(place)
    sizes = dict.fromkeys(records.unreadable, 0) | {record.step: record.nbytes for record in records.steps}
    total = sum(sizes.values())
    findings: list[Finding] = []
    before = leaves = nbytes = count = 0
    for step, size in sorted(sizes.items()):
        folder = step_path(place, step)

        def report(done: int, of: int, before: int = before, size: int = size) -> None:
            if progress is not None:
                progress(before + size * done // (of or 1), total)

        try:
            found = check(folder, report)
        except NotFound:
            # Whoever trains may have removed it meanwhile, which is no damage.
            if step in steps_of(place):
                raise
            continue
        findings += [dataclasses.replace(each, file=os.path.join(folder.name, each.file)) for each in found.findings]  # noqa: PTH118 - a text for people
        leaves, nbytes, count = leaves + found.leaves, nbytes + found.nbytes, count + 1
        before += size
    return Verification(
        path=os.fspath(path),
        findings=tuple(findings),
        leaves=leaves,
        nbytes=nbytes,
        checked=True,
        note=cache_trouble(place),
        steps=count,
    )
