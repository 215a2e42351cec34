"""The process of the demo that trains on eight devices, saves now and then, and is killed in the middle of a save.

``python -m treering._cli.demo.train FOLDER SECONDS`` tells what happens in lines of JSON.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import treering
from treering._cli.demo import digests, meshes, model, text
from treering._cli.demo.telling import tell

__all__ = ["MESH"]

MESH = (4, 2)
"""Lengths of the mesh's axes."""

_FEWEST_STEPS = 10
"""Steps taken even where the time is up before: enough for the loss to fall."""
_SAVES = 3
_LOST_STEPS = 3
_PATIENCE_S = 60.0


def _main(folder: Path, seconds: float) -> None:
    meshes.use_host_devices(MESH[0] * MESH[1])
    config = model.Config(alphabet_size=0)
    corpus = text.load_corpus(context=config.context, seed=config.seed)
    mesh = meshes.mesh_of(*MESH)
    state = meshes.placed(model.start(config._replace(alphabet_size=len(corpus.alphabet))), mesh)
    step = meshes.stepper(state, mesh)
    tell("ready", parameters=model.count_parameters(state.params), characters=len(corpus.tokens))
    began = ends = float("inf")
    saves, loss = 0, float("nan")
    while state.step < _FEWEST_STEPS or time.perf_counter() < ends:
        state, measured = step(state, text.batch_at(corpus, state.position, config.batch))
        loss = float(measured)
        tell("step", loss=loss)
        if state.step == 1:
            # The first step compiles.
            began = time.perf_counter()
            ends = began + seconds
        if saves + 1 < _SAVES and time.perf_counter() - began > seconds * (saves + 1) / _SAVES:
            saves += 1
            _save(folder, state, loss)
    seen = digests.evidence_of(state, text.batch_at(corpus, state.position, config.batch), mesh=_shown(MESH))
    _save(folder, state, loss, evidence=seen.members())
    for _ in range(_LOST_STEPS):
        state, _ = step(state, text.batch_at(corpus, state.position, config.batch))
    treering.save(folder, state, overwrite=True, progress=_Halfway(state.step))
    tell("survived")


def _save(folder: Path, state: model.TrainState, loss: float, **members: object) -> None:
    """Save, and acknowledge it only when it is done."""
    began = time.perf_counter()
    treering.save(folder, state, metadata={"step": state.step, "loss": loss}, overwrite=True)
    tell("saved", step=state.step, seconds=time.perf_counter() - began, **members)


class _Halfway:
    """A progress report that waits at half, for whoever is to kill this process."""

    def __init__(self, step: int) -> None:
        self._step = step

    def __call__(self, done: int, total: int) -> None:
        if done >= total / 2:
            tell("halfway", step=self._step, done=done, total=total)
            time.sleep(_PATIENCE_S)
            sys.exit("nobody killed this process")


def _shown(lengths: tuple[int, ...]) -> str:
    return "x".join(map(str, lengths))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), float(sys.argv[2]))
