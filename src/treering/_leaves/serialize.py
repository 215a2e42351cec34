"""A tree -> zarr v2 arrays in a leaves directory, durable when this returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from treering._arrays.jobs import Progress
from treering._arrays.outgoing import outgoing
from treering._leaves.chunks.write import write_leaves
from treering._leaves.commit import kept_records, update_dropping
from treering._leaves.documents.paths import overlapping
from treering._leaves.documents.record import LeavesRecord, arrays_of, encode_record
from treering._leaves.documents.update import LEAVES_RULES
from treering._leaves.folder.leaves_folder import OpenLeaves
from treering._leaves.folder.rules import Update
from treering._leaves.folder.staged_leaves import StagedLeaves
from treering._leaves.plan import planned_leaves
from treering._tree.flatten import Flattened
from treering.errors import Mismatch


def serialize_leaves(
    path: Path,
    flat: Flattened,
    *,
    prefix: str | None,
    commit_callback: Callable[[], object] | None,
    write_index: bool,
    compressor: Mapping[str, Any] | None,
    chunk_bytes: int | None,
    progress: Progress | None,
) -> None:
    """Write a tree into the directory ``path``, alone; ``treering.leaves.tree_serialize_leaves`` says more."""
    plan = planned_leaves(flat, outgoing(flat), prefix=prefix, compressor=compressor, chunk_bytes=chunk_bytes)
    with StagedLeaves(path, LEAVES_RULES) as staged:
        staged.require_space(plan.nbytes)
        record = plan.record(staged.attempt)
        sizes, checksums = write_leaves(staged, record.folders, plan.leaves, arrays_of(record), progress=progress)
        acknowledge(
            path, staged, dataclasses.replace(record, sizes=sizes, checksums=checksums), write_index=write_index
        )
    if commit_callback is not None:
        commit_callback()


def acknowledge(path: Path, staged: StagedLeaves, record: LeavesRecord, *, write_index: bool) -> None:
    """Make a written save the one that the index names; without the index, one that `index_leaves` finds.

    Raises:
        Mismatch: a leaf would lie in or around the folder of another branch's leaf, or of one that no index lists yet;
            nothing was changed.
        Exists: files of others lie where leaves belong; nothing was changed.
        Corrupt: the index that is there is damaged; nothing was changed.
        Busy: another process is saving there.
    """
    document = encode_record(record)
    if write_index:
        staged.commit(document, lambda old: _update(path, record, old))
    else:
        staged.leave(document)


def _update(path: Path, record: LeavesRecord, old: bytes | None) -> Update:
    """Return the index with this save in it, in the place of older ones of its prefix, indexed or not."""
    with OpenLeaves(path) as folder:
        pending = folder.pending()
        kept = kept_records(folder) if pending else {}
        waiting = [kept[attempt] for attempt in sorted(pending & kept.keys())]
        older = [other for other in waiting if other.prefix == record.prefix]
        update = update_dropping(folder, old, [record], older)
        for other in waiting:
            if other.prefix != record.prefix:
                _require_apart(record, other)
        return update


def _require_apart(record: LeavesRecord, waiting: LeavesRecord) -> None:
    """Refuse leaves in or around those of a save that no index lists yet: none could list both."""
    clash = overlapping((*record.folders, *waiting.folders))
    if clash is not None:
        raise Mismatch(
            f"the folders {clash[0]!r:.200} and {clash[1]!r:.200} are the same, or one lies in the other, and one is of"
            f" a tree with {'no prefix' if waiting.prefix is None else f'the prefix {waiting.prefix!r:.200}'} that was"
            " saved without an index",
            hint="save under another prefix, or into another directory",
        )
