"""A fresh process of the demo: it knows the code and the run's folder, nothing else, and has a mesh of its own.

``python -m demo.resume FOLDER LENGTHS STEP STEPS`` loads that step, or ``latest``, onto a mesh of 2x2,
trains on for so many steps, saves if there were any, and tells of it in lines of JSON.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import jax

import treering
from demo import digests, meshes, model, text
from demo.telling import tell
from demo.train import KEEP

__all__: list[str] = []


def _main(folder: str, lengths: str, which: str, steps: int) -> None:
    along = [int(length) for length in lengths.split("x")]
    meshes.use_host_devices(along[0] * along[1])
    config = model.Config(alphabet_size=0)
    corpus = text.load_corpus(context=config.context, seed=config.seed)
    windows = text.Windows(corpus, config.batch)
    mesh = meshes.mesh_of(*along)
    like = jax.tree.map(_wanted, model.start(config._replace(alphabet_size=len(corpus.alphabet), seed=1)))
    with treering.Run(folder, keep=KEEP) as run:
        began = time.perf_counter()
        number = None if which == "latest" else int(which)
        loaded = run.load(number, {"state": like, "windows": windows}, shardings=meshes.RULES, mesh=mesh)
        seconds = time.perf_counter() - began
        state = loaded["state"]
        tell("loaded", seconds=seconds, evidence=digests.evidence_of(state, windows, mesh=lengths).members())
        if not steps:
            return
        step = meshes.stepper(state, mesh)
        loss = float("nan")
        for _ in range(steps):
            state, measured = step(state, next(windows))
            loss = float(measured)
            tell("step", loss=loss)
        run.save(state.step, {"state": state, "windows": windows}, metrics={"loss": loss})
    tell("saved", step=state.step)


def _wanted(leaf: Any) -> Any:
    """Ask for a jax array of that shape and dtype; Python numbers stand for themselves."""
    if not hasattr(leaf, "dtype"):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
