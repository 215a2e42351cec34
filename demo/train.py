"""The process of the demo that trains on eight devices, saves behind its loop, and is killed in the midst of a save.

``python -m demo.train FOLDER SECONDS`` tells what happens in lines of JSON.
"""

from __future__ import annotations

import sys
import threading
import time

import treering
from demo import digests, meshes, model, text
from demo.telling import tell

MESH = (4, 2)
"""Lengths of the mesh's axes."""
KEEP = treering.KeepLast(3) | treering.KeepBest("loss")
"""Which steps of the run stay."""
LOST_STEPS = 3
"""Steps between the last save that is acknowledged and the one that is killed."""

_FEWEST_STEPS = 10
"""Steps taken even where the time is up before: enough for the loss to fall."""
_SAVE_EVERY = 5
_MOST_TRIES = 30
"""Saves that may be quicker than whoever is to kill this process in the midst of one."""


def _main(folder: str, seconds: float) -> None:
    meshes.use_host_devices(MESH[0] * MESH[1])
    config = model.Config(alphabet_size=0)
    corpus = text.load_corpus(context=config.context, seed=config.seed)
    windows = text.Windows(corpus, config.batch)
    mesh = meshes.mesh_of(*MESH)
    state = meshes.placed(model.start(config._replace(alphabet_size=len(corpus.alphabet))), mesh)
    step = meshes.stepper(state, mesh)
    tell("ready", parameters=model.count_parameters(state.params), characters=len(corpus.tokens))
    ends, loss = float("inf"), float("nan")
    with treering.Run(folder, keep=KEEP, save_every=treering.SaveEvery(steps=_SAVE_EVERY)) as run:
        while state.step < _FEWEST_STEPS or time.perf_counter() < ends:
            state, measured = step(state, next(windows))
            loss = float(measured)
            tell("step", loss=loss)
            if state.step == 1:
                # The first step compiles.
                ends = time.perf_counter() + seconds
            _save(run, state, windows, loss)
        tell("trained")
        waiting = None
        for _ in range(_MOST_TRIES):
            # The save before is written while these steps are taken.
            for _ in range(LOST_STEPS):
                state, measured = step(state, next(windows))
                loss = float(measured)
                tell("step", loss=loss)
            if waiting is not None:
                waiting.join()
            seen = digests.evidence_of(state, windows, mesh="x".join(map(str, MESH)))
            tell("saving", step=state.step, evidence=seen.members())
            waiting = _save(run, state, windows, loss, force=True)
    sys.exit("nobody killed this process in the midst of a save")


def _save(
    run: treering.Run, state: model.TrainState, windows: text.Windows, loss: float, *, force: bool = False
) -> threading.Thread | None:
    """Save if it is time to, and tell how long that kept the loop; the thread tells when it is safe."""
    began = time.perf_counter()
    saved = run.save(state.step, {"state": state, "windows": windows}, metrics={"loss": loss}, force=force)
    stood_still = time.perf_counter() - began
    pending = saved.pending
    if pending is None:
        return None
    tell("begun", step=saved.step, seconds=stood_still)

    def acknowledge() -> None:
        error = pending.exception()
        if error is not None:
            tell("failed", problem=f"the save of step {saved.step} failed: {error}")
        else:
            tell("saved", step=saved.step, seconds=time.perf_counter() - began)

    thread = threading.Thread(target=acknowledge, daemon=True)
    thread.start()
    return thread


if __name__ == "__main__":
    _main(sys.argv[1], float(sys.argv[2]))
