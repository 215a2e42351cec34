"""A tree -> a checkpoint's folder or one file, durable when this returns; the suffix of the path chooses the form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from treering._arrays.host import this_processes
from treering._arrays.outgoing import ALONE
from treering._background.save_job import UNWATCHED, Watch
from treering._background.saves import settle
from treering._checkpoint.joint_driver import require_value
from treering._checkpoint.joint_save import begin_call, write_share
from treering._checkpoint.plan_cache import TreePlan, plan_tree
from treering._checkpoint.save_files import MsgpackSave, SafetensorsSave
from treering._checkpoint.save_folder import write_folder
from treering._checkpoint.save_options import SaveOptions
from treering._coordination.operations import Call
from treering._values.processes import Processes
from treering._values.telemetry import report
from treering._view.progress import showing


@dataclasses.dataclass(frozen=True, slots=True)
class FolderSave:
    """A tree that this process saves into a folder, alone or as its share in a counted save."""

    plan: TreePlan
    host_local: bool = False
    """Whether leaves that each process holds alone are compared."""
    call: Call | None = None
    """The save that other processes take part in."""

    @property
    def nbytes(self) -> int:
        """How much memory its snapshot takes."""
        return self.plan.nbytes

    def snapshot(self) -> FolderSave:
        """Return the same with its leaves in memory that nobody changes any more."""
        return dataclasses.replace(self, plan=self.plan.snapshot(host_local=self.host_local))

    def write(self, options: SaveOptions, watch: Watch = UNWATCHED) -> None:
        """Write the folder, or the share."""
        if self.call is None:
            write_folder(self.plan, options, watch)
        else:
            write_share(self.call, self.plan, options, watch)


PreparedSave: TypeAlias = FolderSave | MsgpackSave | SafetensorsSave
"""A tree that is ready to be saved in one form; nothing was copied or written yet."""

_FILES: Final[Mapping[str, Callable[[Any, Mapping[str, Any]], PreparedSave]]] = {
    ".msgpack": MsgpackSave.of,
    ".safetensors": SafetensorsSave.of,
}


def save_tree(tree: Any, options: SaveOptions) -> None:
    """Save ``tree``; ``treering.save`` says more."""
    with report("save", options.path), showing(options.progress):
        if not options.together:
            settle(options.path)
            prepare_alone(tree, options).write(options)
            return
        plan, processes = plan_together(tree, options, lambda: settle(options.path))
        if processes.count > 1:
            write_share(begin_call(options, processes), plan, options)
        else:
            FolderSave(require_value(plan)).write(options)


def prepare_alone(tree: Any, options: SaveOptions) -> PreparedSave:
    """Prepare to save a tree into a file, or into a folder without the other processes of the job.

    Raises:
        Unsupported: the form cannot hold it.
    """
    prepare = _FILES.get(options.suffix)
    if prepare is None:
        return FolderSave(plan_tree(tree, ALONE))
    return prepare(tree, options.python_metadata())


def plan_together(
    tree: Any, options: SaveOptions, settle_earlier: Callable[[], None]
) -> tuple[TreePlan | Exception, Processes]:
    """Plan to save a tree into a folder, with the other processes of the job if there are any.

    Args:
        tree: the tree.
        options: what the caller asks for.
        settle_earlier: looks at earlier saves to the path, and raises their errors.

    Returns:
        The plan, and the processes that save the tree. Where there are others, the plan may be the error why there is
        none: they wait for this process, and have to be told before it is raised.

    Raises:
        Exception: why this process, which is alone, cannot save the tree.
    """
    try:
        settle_earlier()
        options.python_metadata()
        plan = plan_tree(tree)
    except Exception as error:
        processes = this_processes(())
        if processes.count == 1:
            raise
        return error, processes
    return plan, plan.processes
