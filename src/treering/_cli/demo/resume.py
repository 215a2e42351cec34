"""The fresh process of the demo: it knows the code and the checkpoint, nothing else of the run, and has two devices.

``python -m treering._cli.demo.resume FOLDER`` loads, trains on and saves, and tells of it in lines of JSON.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import jax

import treering
from treering._cli.demo import digests, meshes, model, text
from treering._cli.demo.telling import tell

__all__ = ["MESH"]

MESH = (1, 2)
"""Lengths of the mesh's axes."""

_STEPS = 5


def _main(folder: Path) -> None:
    meshes.use_host_devices(MESH[0] * MESH[1])
    config = model.Config(alphabet_size=0)
    corpus = text.load_corpus(context=config.context, seed=config.seed)
    mesh = meshes.mesh_of(*MESH)
    like = jax.tree.map(_wanted, model.start(config._replace(alphabet_size=len(corpus.alphabet), seed=1)))
    began = time.perf_counter()
    state = treering.load(folder, like, shardings=meshes.RULES, mesh=mesh)
    seconds = time.perf_counter() - began
    batch = text.batch_at(corpus, state.position, config.batch)
    seen = digests.evidence_of(state, batch, mesh="x".join(map(str, MESH)))
    tell("loaded", seconds=seconds, evidence=seen.members())
    step = meshes.stepper(state, mesh)
    loss = float("nan")
    for _ in range(_STEPS):
        state, measured = step(state, text.batch_at(corpus, state.position, config.batch))
        loss = float(measured)
        tell("step", loss=loss)
    began = time.perf_counter()
    treering.save(folder, state, metadata={"step": state.step, "loss": loss}, overwrite=True)
    tell("saved", step=state.step, seconds=time.perf_counter() - began)


def _wanted(leaf: Any) -> Any:
    """Ask for a jax array of that shape and dtype; Python numbers stand for themselves."""
    if not hasattr(leaf, "dtype"):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
