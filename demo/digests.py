"""Digests of a state, leaf by leaf, on whatever devices it lies."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import jax
import numpy as np

from demo import model, text
from demo.evidence import Evidence
from treering._values.keys import join_key


def evidence_of(state: model.TrainState, windows: text.Windows, *, mesh: str) -> Evidence:
    """Digest what is saved of a run, and compute the loss of its next step; everything stays as it is."""
    return Evidence(
        process=os.getpid(),
        mesh=mesh,
        step=state.step,
        leaves=fingerprints({"state": state, "windows": windows.get_state()}),
        next_loss=model.loss_of(state, windows.peek()).hex(),
    )


def fingerprints(tree: Any) -> dict[str, str]:
    """Digest every leaf of a pytree: its type, dtype, shape and every byte.

    Example:
        >>> fingerprints({"step": 3, "w": np.zeros(2, np.float32)})["w"][:12]
        'float32[2] a'
        >>> fingerprints({"step": 3})
        {'step': 'int 3'}
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {join_key(map(_part, path)): _fingerprint(leaf) for path, leaf in leaves}


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
        is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        shape = ",".join(map(str, array.shape))
        name = str(leaf.dtype) if is_key else array.dtype.name
        return f"{name}[{shape}] {hashlib.sha256(np.ascontiguousarray(array)).hexdigest()}"
    shown = leaf.hex() if isinstance(leaf, float) else repr(leaf)
    return f"{type(leaf).__name__} {shown}"
