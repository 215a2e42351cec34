"""Workers of `test_trips`: trees that go from one number of processes to another."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import jax

import treering as tr
from tests.multiprocess import trees
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves

_GENEROUS = 60.0


class Cases:
    """What came of each case of a job."""

    def __init__(self) -> None:
        self.bad: list[str] = []
        self.count = 0

    @contextlib.contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Note what goes wrong in the block."""
        self.count += 1
        try:
            yield
        except Exception:  # noqa: BLE001 - the test is told
            self.bad.append(f"{name}: {traceback.format_exc()}")

    def look(self, name: str, found: list[str]) -> None:
        """Note what is wrong with a result."""
        self.bad += [f"{name}: {one}" for one in found]


def _by_key(order: str) -> Any:
    """Return a function that says where the arrays under ``arrays`` go; everything else goes nowhere new."""

    def sharding(key: str, leaf: Any) -> Any:
        name = key.replace("arrays/", "", 1).replace("arrays.", "", 1)
        if name in trees.ARRAYS or name == "keys":
            return trees.wanted(order, name, leaf.shape)
        return None

    return sharding


def saves(folder: str, number: int) -> None:
    """Save the tree with this number in both forms."""
    tree = trees.tree(number)
    tr.save(f"{folder}/ckpt", tree, overwrite=True, timeout=_GENEROUS, metadata={"number": number})
    tree_serialize_leaves(f"{folder}/leaves", tree, timeout=_GENEROUS)


def loads(cases: Cases, folder: str, number: int) -> None:
    """Load the tree with this number from both forms, in every order."""
    for order in trees.ORDERS:
        with cases.case(f"load {order}"):
            found = tr.load(f"{folder}/ckpt", shardings=_by_key(order), timeout=_GENEROUS)
            cases.look(f"load {order}", trees.problems(found, number, order))
        with cases.case(f"leaves {order}"):
            found = tree_deserialize_leaves(
                f"{folder}/leaves", shardings=_by_key(order), structure="exact", timeout=_GENEROUS
            )
            cases.look(f"leaves {order}", trees.problems(found, number, order))
    with cases.case("load without template"):
        cases.look("load without template", trees.problems(tr.load(f"{folder}/ckpt"), number, None))
    with cases.case("leaves without template"):
        found = tree_deserialize_leaves(f"{folder}/leaves", structure="exact")
        cases.look("leaves without template", trees.problems(found, number, None))
    with cases.case("load into itself"):
        like = trees.tree(number + 50)
        cases.look("load into itself", trees.problems(tr.load(f"{folder}/ckpt", like), number, "as saved"))
    with cases.case("open"), tr.open(f"{folder}/ckpt") as opened:
        part = opened["arrays/large"][100:300, 5:50]
        cases.look("open", [] if (part == trees.whole("large", number)[100:300, 5:50]).all() else ["other items"])
    with cases.case("verify"):
        for name in ("ckpt", "leaves"):
            verdict = tr.verify(f"{folder}/{name}")
            cases.look("verify", [] if verdict.ok else [str(verdict)])


def round_trip(folder: str, number: int) -> dict[str, Any]:
    """Save, then load."""
    cases = Cases()
    with cases.case("save"):
        saves(folder, number)
        loads(cases, folder, number)
    return {"count": cases.count, "bad": cases.bad}


def reads(folders: list[str], numbers: list[int], over: str, number: int) -> dict[str, Any]:
    """Load what others saved, and save over what another number of processes saved."""
    cases = Cases()
    for folder, saved in zip(folders, numbers, strict=True):
        loads(cases, folder, saved)
    if over:
        with cases.case("overwrite"):
            saves(over, number)
            loads(cases, over, number)
    return {"count": cases.count, "bad": cases.bad, "devices": len(jax.devices())}
