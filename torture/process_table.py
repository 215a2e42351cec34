"""The named points of each kind of joint call. All are reached when nobody is disturbed."""

from __future__ import annotations

from typing import Final

from torture.process_points import Point
from torture.process_scenes import JointScene
from torture.process_workers import Layer

__all__ = ["points_of"]

_PUT: Final = "treering._store.notes:FolderNotes.put"
_RENAME: Final = "treering._store.folder:Folder.replace"
_REMOVE: Final = "treering._store.notes:FolderNotes.remove"
_JOURNAL: Final = "treering._store.journal:Journal"
_FOLDER: Final = "treering._store.checkpoint_folder:CheckpointFolder"
_CONTENT: Final = "treering._store.new_file:write_content"
_STAGED: Final = "treering._store.leaves_folder:StagedLeaves"
_MEETING: Final = "treering._arrays.assembly:exchanged"

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
    Point(name="some notes are removed", place=_REMOVE, when="after", of="leader", nth=2, done=True),
    Point(name="the verdict is seen", place=_PUT, when="before", of="follower", says='"seen"', done=True),
    Point(name="it has said so", place=_PUT, when="after", of="follower", says='"seen"', done=True),
)
_CHECKPOINT: Final = (
    Point(name="the folder is entered", place=f"{_FOLDER}.__enter__", when="after", of="leader"),
    Point(name="before the first byte", place=_CONTENT, when="first"),
    Point(name="in the middle of a file", place=_CONTENT, when="middle"),
    Point(name="a file is not durable yet", place=_CONTENT, when="after"),
    Point(name="all parts are there", place=f"{_FOLDER}.commit", when="before", of="leader"),
    Point(name="the journal is durable", place=f"{_JOURNAL}.fill", when="after", of="leader"),
    Point(name="it is committed", place=f"{_FOLDER}.commit", when="after", of="leader", done=True),
)
_FIRST: Final = (
    Point(name="the index is there", place=f"{_JOURNAL}.become_first", when="after", of="leader", done=True),
)
_OVERWRITE: Final = (
    Point(name="the index is replaced", place=f"{_JOURNAL}.become_next", when="after", of="leader", done=True),
)
_LOAD: Final[tuple[Point, ...]] = ()


def points_of(scene: JointScene, layer: Layer) -> tuple[Point, ...]:
    """Return the points of a call; a load needs a real job."""
    if scene.loads:
        return () if layer == "forged" else _LOAD
    if scene.form == "leaves":
        return _TALK
    return (*_TALK, *_CHECKPOINT, *(_OVERWRITE if scene.old else _FIRST))
