"""Where a tree is saved to: the suffix of the path chooses the form."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from treering._arrays.host import this_processes, with_python_numbers
from treering._arrays.jobs import Progress
from treering._background.saves import settle
from treering._checkpoint.folder_path import new_folder_path
from treering._checkpoint.joint_save import HostLocal, Wishes, save_together
from treering._checkpoint.plan_cache import TreePlan, plan_tree
from treering._checkpoint.save import save_checkpoint
from treering._checkpoint.save_safetensors import save_safetensors
from treering._checkpoint.source import require_path
from treering._printable import kind_of
from treering._values.processes import Processes, timeout_seconds
from treering._view.progress import reporter, showing
from treering._wire.save_file import save_msgpack
from treering._wire.state_file import new_path
from treering.errors import Unsupported

# Suffixes of files of others: a folder of such a name would not be what its user expects.
_OTHER_FORMS: Final = frozenset(
    {".bin", ".gguf", ".gz", ".h5", ".hdf5", ".json", ".npy", ".npz", ".onnx", ".pkl", ".pickle", ".pt", ".pth", ".zip"}
)

_FILES: Final = {".msgpack": save_msgpack, ".safetensors": save_safetensors}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the caller of a save asks for, looked at before the tree is."""

    place: Path
    """Where to."""
    metadata: Mapping[str, Any] | None
    """As given: what it is is looked at with the tree, for another process may have a right one."""
    overwrite: bool
    """Whether what is there may be replaced."""
    progress: Progress | None
    """Called with the bytes that are done."""
    together: bool
    """Whether all processes of the job save it, if there are any others."""
    host_local: HostLocal
    """Where leaves come from that each process holds alone."""
    timeout: float
    """Seconds to wait at one point for others."""

    @classmethod
    def of(
        cls,
        path: str | os.PathLike[str],
        *,
        metadata: Mapping[str, Any] | None,
        overwrite: bool,
        progress: Progress | bool | None,
        processes: Literal["all", "this"],
        host_local: HostLocal,
        timeout: float | None,
    ) -> Asked:
        """Return what the arguments of ``treering.save`` say.

        Raises:
            Unsupported: one of them has no meaning.
        """
        require_path(path)
        seconds = timeout_seconds(timeout)
        _require_one_of("processes", processes, ("all", "this"))
        _require_one_of("host_local", host_local, ("first", "equal"))
        place = _place(path)
        suffix = place.suffix.lower()
        if suffix in _OTHER_FORMS:
            hint = "a name without it becomes a folder; .safetensors and .msgpack become one file"
            raise Unsupported(f"{os.fspath(path)!r}: treering writes no {suffix} files", hint=hint)
        return cls(
            place=place,
            metadata=metadata,
            overwrite=overwrite,
            progress=reporter(progress, "saving"),
            together=processes == "all" and suffix not in _FILES,
            host_local=host_local,
            timeout=seconds,
        )

    @property
    def file_form(self) -> Callable[..., None] | None:
        """What writes the one file that the suffix asks for; None for a folder."""
        return _FILES.get(self.place.suffix.lower())

    def wishes(self) -> Wishes:
        """Return what a joint save goes by.

        Raises:
            Unsupported: the metadata is no dict.
        """
        return Wishes(
            metadata=self.kept(), overwrite=self.overwrite, host_local=self.host_local, progress=self.progress
        )

    def kept(self) -> dict[str, Any]:
        """Return the metadata, with Python's numbers in it.

        Raises:
            Unsupported: it is no dict.
        """
        if not isinstance(self.metadata, Mapping | None):
            raise Unsupported(f"metadata is {kind_of(self.metadata)}, not a dict of JSON")
        return with_python_numbers(self.metadata or {})


def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    metadata: Mapping[str, Any] | None,
    overwrite: bool,
    progress: Progress | bool | None,
    processes: Literal["all", "this"],
    host_local: HostLocal,
    timeout: float | None,
) -> None:
    """Write ``tree`` to ``path``; ``treering.save`` says more."""
    asked = Asked.of(
        path,
        metadata=metadata,
        overwrite=overwrite,
        progress=progress,
        processes=processes,
        host_local=host_local,
        timeout=timeout,
    )
    with showing(asked.progress):
        if asked.together:
            _save_folder(asked, tree)
        else:
            _save_alone(asked, tree)


def _save_alone(asked: Asked, tree: Any) -> None:
    """Write ``tree`` into a single file, or into a folder without the other processes of the job."""
    settle(asked.place)
    write = asked.file_form
    if write is not None:
        write(asked.place, tree, metadata=asked.kept(), overwrite=asked.overwrite, progress=asked.progress)
    else:
        plan = plan_tree(tree, Processes(this=0, count=1))
        save_checkpoint(asked.place, plan, metadata=asked.kept(), overwrite=asked.overwrite, progress=asked.progress)


def _save_folder(asked: Asked, tree: Any) -> None:
    """Write ``tree`` into a folder: with the other processes of the job, if there are any."""
    plan, wishes, processes = planned_together(asked, tree, lambda: settle(asked.place))
    if processes.count > 1:
        save_together(asked.place, plan, wishes, processes=processes, timeout=asked.timeout)
    elif not isinstance(plan, Exception):
        save_checkpoint(
            asked.place, plan, metadata=wishes.metadata, overwrite=wishes.overwrite, progress=wishes.progress
        )


def planned_together(
    asked: Asked, tree: Any, settled: Callable[[], None]
) -> tuple[TreePlan | Exception, Wishes, Processes]:
    """Return a tree, planned, what the caller wishes, and the processes that save it.

    Args:
        asked: what the caller asks for.
        tree: the tree.
        settled: looks at earlier saves to the path, and raises what became of them.

    Returns:
        In place of the plan the error why there is none, where there are other processes: they would wait for this
        one, and are told first.

    Raises:
        Exception: why the tree cannot be saved by this process, which is alone.
    """
    # Often only process 0 has metadata; were it to fail alone, its next save would go with this one of the others.
    wishes = dataclasses.replace(asked, metadata=None).wishes()
    try:
        settled()
        wishes = asked.wishes()
        plan = plan_tree(tree)
    except Exception as error:
        processes = this_processes(())
        if processes.count == 1:
            raise
        return error, wishes, processes
    return plan, wishes, plan.processes


def _require_one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise Unsupported(f"{name} is {value!r:.100}, it has to be {' or '.join(map(repr, known))}")


def _place(path: str | os.PathLike[str]) -> Path:
    """Return the path; a folder's may end in a separator."""
    if isinstance(path, str) and Path(path).suffix.lower() in _FILES:
        return new_path(path)
    return new_folder_path(path)
