"""Proofs: what a state is to the last bit, what its next step gives, and both again from a fresh process."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

import treering
from treering._cli.demo import model, text
from treering._values.keys import join_key

__all__ = [
    "Evidence",
    "Proof",
    "as_json",
    "evidence_of",
    "fingerprints",
    "from_fresh_process",
    "largest_leaf",
    "template",
]

_PATIENCE_S = 180.0


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
    leaves: dict[str, str]
    """For each leaf's key text its type, shape and SHA-256."""
    next_loss: str
    """The loss of the next training step, as ``float.hex`` writes it: every bit."""
    load_seconds: float
    """Time that the load took; 0 in the process that trained."""


def fingerprints(tree: Any) -> dict[str, str]:
    """Digest every leaf of a pytree: its type, dtype, shape and every byte.

    Example:
        >>> fingerprints({"step": 3, "w": np.zeros(2, np.float32)})["w"][:12]
        'float32[2] a'
        >>> fingerprints({"step": 3})
        {'step': 'int 3'}
    """
    return {key: _fingerprint(leaf) for key, leaf in _named_leaves(tree)}


def largest_leaf(tree: Any) -> tuple[str, int]:
    """Name the array with the most bytes, and say how many.

    Example:
        >>> largest_leaf({"small": np.zeros(2, np.int8), "large": np.zeros(3, np.int8)})
        ('large', 3)
    """
    return max(
        ((key, leaf.nbytes) for key, leaf in _named_leaves(tree) if hasattr(leaf, "nbytes")), key=lambda it: it[1]
    )


def template(corpus: text.Corpus) -> model.TrainState:
    """Make a state of the right structure and other numbers, as a program that restarts does."""
    return model.start(model.Config(alphabet_size=len(corpus.alphabet), seed=1))


def evidence_of(state: model.TrainState, corpus: text.Corpus, *, load_seconds: float = 0.0) -> Evidence:
    """Digest a state and take its next training step; the state itself stays as it is."""
    leaves = fingerprints(state)
    _, loss = model.train_step(state, text.batch_at(corpus, state.position, int(state.config["batch"])))
    return Evidence(process=os.getpid(), leaves=leaves, next_loss=float(loss).hex(), load_seconds=load_seconds)


def as_json(evidence: Evidence) -> str:
    """Write evidence as one line, for another process."""
    return json.dumps(dataclasses.asdict(evidence))


def from_fresh_process(file: Path) -> Evidence | str:
    """Let a new Python process load the file; returns what it saw, or the end of its complaint."""
    command = [sys.executable, "-P", "-m", "treering._cli.demo.fresh", os.fspath(file)]
    # The new process must find this very treering, wherever it was imported from.
    home = os.fspath(Path(treering.__file__).resolve().parents[1])
    paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(  # noqa: S603
            command, env=environment, capture_output=True, text=True, encoding="utf-8", check=False, timeout=_PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        return f"the new process was still busy after {_PATIENCE_S:.0f} s"
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        complaint = done.stderr.strip().splitlines() or ["it said nothing"]
        return f"the new process ended with code {done.returncode}: {complaint[-1]}"
    return Evidence(**json.loads(lines[-1]))


def _named_leaves(tree: Any) -> list[tuple[str, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(join_key(map(_part, path)), leaf) for path, leaf in leaves]


def _part(entry: Any) -> str:
    """Name one step of a jax key path: a dict's key, a list's index, a named tuple's field."""
    match entry:
        case jax.tree_util.DictKey(key):
            return str(key)
        case jax.tree_util.SequenceKey(place):
            return str(place)
        case _:
            return str(entry).lstrip(".")


def _fingerprint(leaf: Any) -> str:
    if isinstance(leaf, jax.Array | np.ndarray):
        array = np.asarray(leaf)
        shape = ",".join(map(str, array.shape))
        return f"{array.dtype.name}[{shape}] {hashlib.sha256(np.ascontiguousarray(array)).hexdigest()}"
    shown = leaf.hex() if isinstance(leaf, float) else repr(leaf)
    return f"{type(leaf).__name__} {shown}"
