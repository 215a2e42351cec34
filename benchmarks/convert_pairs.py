"""Groups that convert one source to each format that treering writes, beside a copy of the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import treering
from benchmarks.convert_scene import ConvertFiles
from benchmarks.files import bytes_read, contents, fsync
from benchmarks.measure import Case, Group, Work
from treering._checkpoint.forms import FORMS

__all__ = ["TARGETS", "group_name", "groups"]

_SUFFIXES = {"safetensors": ".safetensors", "npz": ".npz", "flax": ".msgpack"}
_PIECE = 4 << 20

TARGETS = FORMS
"""Formats of the target."""


def group_name(target: str) -> str:
    """The name of the group that converts to a format."""
    return f"to {target}"


def groups(scene: ConvertFiles) -> tuple[Group, ...]:
    """One for each target."""
    return tuple(
        Group(
            name=group_name(target),
            cases=(_convert(scene, target), _copy(scene)),
            between=scene.files.clear,
            unit="bytes read / bytes of the tree",
        )
        for target in TARGETS
    )


def _convert(scene: ConvertFiles, target: str) -> Case:
    def begin() -> Work:
        source, folder = scene.cached(), scene.files.new()
        folder.mkdir()
        path = folder / f"it{_SUFFIXES.get(target, '')}"

        def work() -> tuple[Path, int]:
            before = bytes_read()
            treering.convert(source, path, to=target, lose=("metadata", "structure"))
            return path, bytes_read() - before

        return work

    def check(result: Any) -> str | None:
        return scene.right_leaves(treering.load(result[0]))

    return Case(name="treering", begin=begin, check=check, count=lambda result: result[1] / scene.work.nbytes)


def _copy(scene: ConvertFiles) -> Case:
    """One read and one durable write of the bytes of the source."""

    def begin() -> Work:
        source, path = scene.cached(), scene.files.new()

        def work() -> Path:
            with path.open("wb", buffering=0) as written:
                for each in contents(source):
                    with each.open("rb", buffering=0) as file:
                        while piece := file.read(_PIECE):
                            written.write(piece)
            fsync(path)
            return path

        return work

    def check(path: Path) -> str | None:
        wanted = sum(each.stat().st_size for each in contents(scene.path))
        return None if path.stat().st_size == wanted else "the copy has another size"

    return Case(name="copy", begin=begin, check=check, limit=True)
