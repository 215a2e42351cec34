"""A tree on its way into a bucket and back: what each case is given, and what makes its result right."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import treering
from benchmarks import workloads
from benchmarks.bucket_peers import PEERS, Peer
from benchmarks.byte_bucket import BUCKET, remove_objects, start_server
from benchmarks.measure import Case, Group, Work, equal_bytes
from benchmarks.workloads import LeafKind, Tree

__all__ = ["TreeScene", "costs", "url_of"]


class _Spent(NamedTuple):
    """A result, and what it cost this process."""

    result: Any
    cpu: float


def costs(work: Work) -> Work:
    """The same work, which tells the processor time of this process too, all threads together."""

    def done() -> _Spent:
        before = time.process_time()
        result = work()
        return _Spent(result, time.process_time() - before)

    return done


def _cpu(spent: _Spent) -> float:
    return spent.cpu


def url_of(key: str, bucket: str = BUCKET) -> str:
    """The URL of a key."""
    return f"s3://{bucket}/{key}"


class TreeScene:
    """A tree of jax arrays as treering and the others keep it in a bucket.

    Args:
        name: A or B.
        leaves: jax.
        factor: scales its bytes.
        folder: tells scenes of one run apart.
    """

    repeats = 1

    def __init__(self, name: str, leaves: LeafKind, factor: float, folder: Path) -> None:
        assert leaves == "jax"  # all workloads with trees are jax_only
        start_server()
        self._work = workloads.build(name, factor)
        self._flat: dict[str, Any] = dict(workloads.flat(self._work.tree))
        self._top = f"{name}-{folder.name}"
        self._peers: tuple[Peer, ...] = tuple(peer() for peer in PEERS)
        self._count = 0
        self.title, self.nbytes = self._work.title, self._work.nbytes

    def prepare(self) -> None:
        """Save the tree once by each, for the loads."""
        tree = workloads.to_jax(self._work.tree)
        treering.save(url_of(self._kept("treering")), tree)
        for peer in self._peers:
            peer.save(self._kept(peer.name), self._bytes if peer.raw else tree)

    def close(self) -> None:
        """Remove every object."""
        remove_objects(f"{self._top}/")

    def groups(self) -> tuple[Group, ...]:
        """Saving and loading."""
        loads = (self._load("treering", like=True), self._load("treering, no like", like=False))
        unit = "CPU s of the client"
        return (
            Group(
                name="save", cases=(self._save(), *map(self._peer_save, self._peers)), room=2 * self.nbytes, unit=unit
            ),
            Group(
                name="load", cases=(*loads, *map(self._peer_load, self._peers)), room=9 * self.nbytes // 4, unit=unit
            ),
        )

    # Inputs.

    @cached_property
    def _bytes(self) -> bytes:
        return b"".join(leaf.reshape(-1).view(np.uint8).data for leaf in self._flat.values())

    @cached_property
    def _room(self) -> np.ndarray[Any, Any]:
        return np.ones(self.nbytes, np.uint8)

    def _kept(self, name: str) -> str:
        return f"{self._top}/kept/{name.replace(' ', '_').replace('+', 'and')}"

    def _new(self) -> str:
        """A key where nothing is."""
        self._count += 1
        return f"{self._top}/new/{os.getpid()}-{self._count}"

    # Cases.

    def _save(self) -> Case:
        def begin() -> Work:
            tree, key = workloads.to_jax(self._work.tree), self._new()

            def work() -> str:
                treering.save(url_of(key), tree)
                return key

            return costs(work)

        return Case(name="treering", begin=begin, check=self._right(lambda key: treering.load(url_of(key))), count=_cpu)

    def _peer_save(self, peer: Peer) -> Case:
        def begin() -> Work:
            given, key = (self._bytes if peer.raw else workloads.to_jax(self._work.tree)), self._new()

            def work() -> str:
                peer.save(key, given)
                return key

            return costs(work)

        def check(spent: _Spent) -> str | None:
            if not peer.raw:
                return self._right(lambda key: peer.load(key, self._work.tree))(spent)
            peer.load(spent.result, self._room)
            remove_objects(spent.result)
            return self._right_room(spent)

        return Case(name=peer.name, begin=begin, check=check, count=_cpu)

    def _load(self, name: str, *, like: bool) -> Case:
        def begin() -> Work:
            single = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            url = url_of(self._kept("treering"))
            target = workloads.mapped(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=single), self._work.tree
            )
            return costs(lambda: jax.block_until_ready(treering.load(url, target if like else None)))

        return Case(name=name, begin=begin, check=self._right_tree, count=_cpu)

    def _peer_load(self, peer: Peer) -> Case:
        def begin() -> Work:
            given = self._room if peer.raw else self._work.tree
            if peer.raw:
                self._room[:] = 1
            return costs(lambda: peer.load(self._kept(peer.name), given))

        return Case(name=peer.name, begin=begin, check=self._right_room if peer.raw else self._right_leaves, count=_cpu)

    # Checks.

    def _right(self, load: Callable[[str], Any]) -> Callable[[_Spent], str | None]:
        """Whether what was saved loads, after which it is removed."""

        def check(spent: _Spent) -> str | None:
            tree = load(spent.result)
            remove_objects(spent.result)
            return self._same(dict(workloads.flat(tree)))

        return check

    def _same(self, leaves: dict[str, Any]) -> str | None:
        return workloads.same_leaves(leaves, self._flat, jax.Array)

    def _right_tree(self, spent: _Spent) -> str | None:
        tree: Tree = spent.result
        return self._same(dict(workloads.flat(tree)))

    def _right_leaves(self, spent: _Spent) -> str | None:
        return self._same(spent.result)

    def _right_room(self, _: _Spent) -> str | None:
        return None if equal_bytes(self._room, self._bytes) else "the bytes are not those of the leaves"
