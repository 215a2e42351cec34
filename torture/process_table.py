"""The named points of each kind of joint call. All are reached when nobody is disturbed."""

from __future__ import annotations

from typing import Final

from torture.process_points import Point
from torture.process_scenes import JointScene
from torture.process_workers import Layer

__all__ = ["points_of"]

_PUT: Final = "treering._coordination.message_board:FolderMessageBoard.put"
_RENAME: Final = "treering._store.posix.folder:Folder.replace"
_REMOVE: Final = "treering._coordination.message_board:FolderMessageBoard.remove_all"
_REMOVE_ONE: Final = "treering._store.posix.folder:Folder.remove"
_JOURNAL: Final = "treering._store.posix.store:PosixTransaction"
_FOLDER: Final = "treering._checkpoint.transaction:CheckpointFolder"
_CONTENT: Final = "treering._store.posix.store:write_content"
_STAGED: Final = "treering._store.leaves_folder.staged_leaves:StagedLeaves"
_JOINED_LEAVES: Final = "treering._store.leaves_folder.staged_leaves:JoinedLeaves"
_JOINED: Final = "treering._checkpoint.transaction:JoinedFolder"
_WRITES: Final = "treering._store.leaves_folder.staged_leaves:_StagedFiles.write"
_MOVING: Final = "treering._store.leaves_folder.staged_leaves:LeavesCommit"
_HAND_OVER: Final = "treering._background.writer:Writer.hand_over"
_TOGETHER: Final = "treering._checkpoint.joint_load"
_MEETING: Final = "treering._coordination.job_handshake:allgather_in_order"

# What processes say to each other is the same in both forms.
_TALK: Final = (
    Point(name="the call begins", place="torture.process_scenes:JointScene.save", when="before"),
    Point(name="begin is not put yet", place=_PUT, when="before", of="leader", named="-begin"),
    Point(name="begin is put halfway", place=_RENAME, when="before", of="leader", named="-begin"),
    Point(name="begin is put", place=_PUT, when="after", of="leader", named="-begin"),
    Point(name="its part is not put yet", place=_PUT, when="before", named="-part-", says='"written"'),
    Point(name="its part is put", place=_PUT, when="after", of="leader", named="-part-", says='"written"'),
    Point(name="its part is put", place=_PUT, when="after", of="follower", named="-part-", says='"written"', done=True),
    Point(name="the verdict is not put yet", place=_PUT, when="before", of="leader", named="-verdict", done=True),
    Point(name="the verdict is put halfway", place=_RENAME, when="before", of="leader", named="-verdict", done=True),
    Point(name="the verdict is put", place=_PUT, when="after", of="leader", named="-verdict", done=True),
    Point(name="all others have left", place=_REMOVE, when="before", of="leader", named="-verdict", done=True),
    Point(name="some notes are removed", place=_REMOVE_ONE, when="after", of="leader", named="-here-", done=True),
    Point(name="all votes are handed on", place=_PUT, when="before", of="collector", named="-sum-", done=True),
    Point(name="the sum is put", place=_PUT, when="after", of="collector", named="-sum-", done=True),
    Point(name="those below have left", place=_REMOVE, when="before", of="collector", named="-left-", done=True),
    Point(name="the verdict is seen", place=_PUT, when="before", of="follower", says='"seen"', done=True),
    Point(name="it has said so", place=_PUT, when="after", of="follower", says='"seen"', done=True),
)
_CHECKPOINT: Final = (
    Point(name="the folder is entered", place=f"{_FOLDER}.__enter__", when="after", of="leader"),
    Point(name="it has no file yet", place=f"{_FOLDER}.write_file", when="before", of="leader"),
    Point(name="it has no file yet", place=f"{_JOINED}.write_file", when="before", of="follower"),
    Point(name="before the first byte", place=_CONTENT, when="first"),
    Point(name="in the middle of a file", place=_CONTENT, when="middle"),
    Point(name="a file is not durable yet", place=_CONTENT, when="after"),
    Point(name="all parts are there", place=f"{_FOLDER}.commit", when="before", of="leader"),
    Point(name="the journal is durable", place=f"{_JOURNAL}._prepare", when="after", of="leader"),
    Point(name="it is committed", place=f"{_FOLDER}.commit", when="after", of="leader", done=True),
)
_FIRST: Final = (Point(name="the index is there", place=f"{_JOURNAL}.commit", when="after", of="leader", done=True),)
# What is handed over is written while the caller goes on: how far that has come cannot be known.
_BACKGROUND: Final = (
    Point(name="it is not handed over yet", place=_HAND_OVER, when="before"),
    Point(name="it is handed over", place=_HAND_OVER, when="after", done=None),
)
_OVERWRITE: Final = (
    Point(name="the index is replaced", place=f"{_JOURNAL}.commit", when="after", of="leader", done=True),
)
_LEAVES: Final = (
    Point(name="the attempt has its folder", place=f"{_STAGED}.__init__", when="after", of="leader"),
    Point(name="before the first chunk", place=_WRITES, when="before"),
    Point(name="between two chunks", place=_WRITES, when="after"),
    Point(name="its chunks are not durable yet", place=f"{_STAGED}.make_durable", when="before", of="leader"),
    Point(name="its chunks are not durable yet", place=f"{_JOINED_LEAVES}.make_durable", when="before", of="follower"),
    Point(name="all parts are there", place=f"{_STAGED}.commit", when="before", of="leader"),
    Point(name="the directory is locked", place=f"{_MOVING}._begin", when="after", of="leader"),
    Point(name="the index is not replaced yet", place=f"{_MOVING}._replace", when="before", of="leader"),
    Point(name="the index is replaced", place=f"{_MOVING}._replace", when="after", of="leader", done=True),
    Point(name="the files are moved", place=f"{_MOVING}._replace", when="before", of="leader", nth=2, done=True),
    Point(name="the index is settled", place=f"{_MOVING}._replace", when="after", of="leader", nth=2, done=True),
    Point(name="it is committed", place=f"{_STAGED}.commit", when="after", of="leader", done=True),
)
# Only a real job has to agree on its name, and to see that all have the same folder.
_AGREEING: Final = (
    Point(name="the first meeting begins", place=_MEETING, when="before"),
    Point(name="the second meeting begins", place=_MEETING, when="before", nth=2),
    Point(name="the second meeting is over", place=_MEETING, when="after", nth=2),
)
_LOAD: Final = (
    Point(name="the call begins", place="torture.process_scenes:JointScene.load", when="before"),
    Point(name="the tree is opened", place=f"{_TOGETHER}:LoadGroup.agree", when="before"),
    Point(name="the first meeting begins", place=f"{_TOGETHER}:allgather_with_deadline", when="before"),
    Point(name="reading begins", place=f"{_TOGETHER}:LoadGroup.read_batches", when="before"),
    Point(name="all is read", place=f"{_TOGETHER}:LoadGroup.read_batches", when="after"),
    Point(name="the last meeting begins", place=f"{_TOGETHER}:LoadGroup.end", when="before"),
    # Whoever is ahead of the others by a hair may have taken the last word with it.
    Point(name="the last meeting is over", place=f"{_TOGETHER}:LoadGroup.end", when="after", done=None),
)
_COMPARES_FIRST: Final = (
    Point(name="the first meeting is over", place=f"{_TOGETHER}:allgather_with_deadline", when="after"),
)
_ONE_INDEX: Final = (
    Point(name="the index is not offered yet", place=f"{_TOGETHER}:LoadGroup.share_index", when="before"),
    Point(name="the index is not sent yet", place=f"{_TOGETHER}:broadcast_bytes", when="before"),
    Point(name="the index is sent", place=f"{_TOGETHER}:broadcast_bytes", when="after"),
    Point(name="the index is there", place=f"{_TOGETHER}:LoadGroup.share_index", when="after"),
)
_EXCHANGE: Final = (
    Point(name="the own part is read", place=f"{_TOGETHER}:take_parts", when="before"),
    Point(
        name="the meeting before the exchange begins",
        place=f"{_TOGETHER}:allgather_with_deadline",
        when="before",
        nth=2,
    ),
    Point(
        name="the last meeting before the exchange begins", place=f"{_TOGETHER}:LoadGroup._meet_again", when="before"
    ),
    Point(name="the exchange begins", place=f"{_TOGETHER}:exchange_parts", when="before"),
    Point(name="the exchange is over", place=f"{_TOGETHER}:exchange_parts", when="after"),
)


def points_of(scene: JointScene, layer: Layer) -> tuple[Point, ...]:
    """Return the points of a call; a load needs a real job."""
    if scene.loads:
        if layer == "forged":
            return ()
        exchanges = scene.name.endswith("exchange")
        return (
            *_LOAD,
            *(_COMPARES_FIRST if exchanges or scene.compares_first else ()),
            *(_EXCHANGE if exchanges else ()),
            *(_ONE_INDEX if scene.one_index else ()),
        )
    talk = _TALK if layer == "forged" else (*_AGREEING, *_TALK)
    if scene.form == "leaves":
        return (*talk, *_LEAVES)
    thread = _BACKGROUND if scene.background or scene.form == "run" else ()
    # The folder of a step is new, whatever steps there are.
    commit = _OVERWRITE if scene.old and scene.form == "checkpoint" else _FIRST
    return (*talk, *_CHECKPOINT, *thread, *commit)
