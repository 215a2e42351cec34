"""Evidence: what a process saw of a state, to the last bit; and proofs, which compare it. Without jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from treering._values.human import pluralize


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """One claim that the demo checked."""

    claim: str
    """What should hold."""
    held: bool
    """Whether it did."""
    detail: str
    """The numbers behind it, or what was found instead."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What one process saw of a state."""

    process: int
    """Its process id."""
    mesh: str
    """The mesh that the state lay on."""
    step: int
    """Steps that the state had taken."""
    leaves: Mapping[str, str]
    """For each leaf's key text its type, shape and SHA-256."""
    next_loss: str
    """The loss of its next training step on one device, as ``float.hex`` writes it: every bit."""

    def members(self) -> dict[str, Any]:
        """Give it as members of a JSON object, for another process.

        Example:
            >>> seen = Evidence(process=1, mesh="4x2", step=3, leaves={"w": "int 3"}, next_loss="0x1p+0")
            >>> Evidence(**seen.members()) == seen
            True
        """
        return dataclasses.asdict(self)


def compared(here: Evidence, there: Evidence) -> list[Proof]:
    """Prove that two processes saw the same state, or name where they did not.

    Example:
        >>> seen = Evidence(process=1, mesh="4x2", step=3, leaves={"w": "int 3"}, next_loss="0x1p+0")
        >>> [proof.held for proof in compared(seen, seen)]
        [True, True]
    """
    unequal = [key for key in {**here.leaves, **there.leaves} if here.leaves.get(key) != there.leaves.get(key)]
    count = len(here.leaves)
    same_loss = there.next_loss == here.next_loss
    return [
        Proof(
            claim=f"Moved to {there.mesh}, every bit is there",
            held=not unequal and bool(count),
            detail=f"{pluralize(len(unequal), 'leaves differ')}, the first is {unequal[0]}"
            if unequal
            else f"{count} of {pluralize(count, 'leaves')} equal by SHA-256 to those on {here.mesh}",
        ),
        Proof(
            claim=f"Moved to {there.mesh}, training goes on unchanged",
            held=same_loss,
            detail=f"next loss {float.fromhex(here.next_loss):.6f}, "
            + ("equal to the last bit" if same_loss else f"there {float.fromhex(there.next_loss):.6f}"),
        ),
    ]
