"""Trees that lie in many boxes: how often each call asks a bucket, and how long it takes with 30 ms for an answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import treering
from benchmarks.bucket_requests import call_groups
from benchmarks.bucket_scene import costs, url_of
from benchmarks.byte_bucket import BUCKET, NEAR_BUCKET, remove_objects, start_server
from benchmarks.measure import Case, Group, Work
from benchmarks.workloads import LeafKind, mesh, sharded

__all__ = ["COMPARED", "WHOLE", "MeshScene"]

COMPARED = "load boxes beside whole leaves"
WHOLE = "whole leaves over 4 x 2"

_SIDE = 64
_FAR = (NEAR_BUCKET, "30 ms")


class MeshScene:
    """Leaves of 16 KiB that were saved over a mesh of 4 x 2, each in eight boxes.

    Args:
        name: M.
        leaves: jax.
        factor: on the number of leaves, 2,000.
        folder: tells scenes of one run apart.
    """

    repeats = 1

    def __init__(self, name: str, leaves: LeafKind, factor: float, folder: Path) -> None:
        assert leaves == "jax"  # all of it is about meshes
        start_server()
        count = max(8, round(2000 * factor))
        self._folder = folder
        self._top = f"{name}-{folder.name}"
        self._tree = {f"leaf_{number:04}": np.full((_SIDE, _SIDE), number, np.float32) for number in range(count)}
        self.nbytes = count * _SIDE * _SIDE * 4
        self.title = f"{count:,} leaves of 16 KiB over a mesh of 4 x 2"

    def prepare(self) -> None:
        """Save it in boxes, and whole."""
        treering.save(url_of(f"{self._top}/boxes"), jax.device_put(self._tree, self._over(turned=False)))
        treering.save(url_of(f"{self._top}/whole"), self._tree)

    def close(self) -> None:
        """Remove every object."""
        remove_objects(f"{self._top}/")

    def groups(self) -> tuple[Group, ...]:
        """Each of the calls near by and far away."""
        calls: dict[str, Callable[[str], Any]] = {
            "load": lambda bucket: treering.load(self._url("boxes", bucket)),
            "load as saved": lambda bucket: self._load("boxes", bucket, turned=False),
            "load over 2 x 4": lambda bucket: self._load("boxes", bucket, turned=True),
            "load whole leaves over 4 x 2": lambda bucket: self._load("whole", bucket, turned=False),
            "open, leaf by leaf": self._read_each,
            "verify": lambda bucket: treering.verify(self._url("boxes", bucket)),
            "diff": lambda bucket: (
                treering.diff(self._url("boxes", bucket), self._url("whole", bucket), values=True).differences
            ),
        }
        compared = Group(
            name=COMPARED,
            cases=(
                self._timed("treering", "boxes", turned=False),
                self._timed("treering, over 2 x 4", "boxes", turned=True),
                self._timed(WHOLE, "whole", turned=False, limit=True),
            ),
            peaks=False,
            unit="CPU s",
        )
        counted = (call_groups(name, self._begin(call), beside_data=False, far=_FAR) for name, call in calls.items())
        return (compared, *(group for pair in counted for group in pair))

    def _timed(self, name: str, kept: str, *, turned: bool, limit: bool = False) -> Case:
        def begin() -> Work:
            return costs(lambda: self._load(kept, BUCKET, turned=turned))

        def check(spent: Any) -> str | None:
            same = all(np.array_equal(spent.result[key], leaf) for key, leaf in self._tree.items())
            return None if same else "the values differ"

        return Case(name=name, begin=begin, check=check, count=lambda spent: spent.cpu, limit=limit)

    @staticmethod
    def _begin(call: Callable[[str], Any]) -> Callable[[str], Work]:
        return lambda bucket: lambda: call(bucket)

    def _url(self, kept: str, bucket: str) -> str:
        return url_of(f"{self._top}/{kept}", bucket)

    def _over(self, *, turned: bool) -> Any:
        return sharded(self._tree["leaf_0000"], mesh(turned=turned))

    def _load(self, kept: str, bucket: str, *, turned: bool) -> Any:
        return jax.block_until_ready(treering.load(self._url(kept, bucket), shardings=self._over(turned=turned)))

    def _read_each(self, bucket: str) -> Any:
        with treering.open(self._url("boxes", bucket)) as opened:
            return {name: opened[name][...] for name in opened}
