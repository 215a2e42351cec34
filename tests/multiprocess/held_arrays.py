"""Worker of `test_held_arrays`: a job saves arrays that it holds since the step before, as on devices of its own."""

from __future__ import annotations

import errno
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treering as tr
from tests import faults, limits
from tests.multiprocess.trees import placed, spread
from tests.reads import act_on_snapshots

_GENEROUS = 60.0


def _copied(patch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return a list that gets the keys of what each snapshot copied of the arrays that lie over processes."""
    found: list[list[str]] = []
    act_on_snapshots(
        patch,
        lambda plan, copied: found.append([plan.flat.keys[leaf] for leaf in plan.leaves.spread if leaf in copied]),
    )
    return found


def saves_steps(folder: str) -> dict[str, Any]:
    """Save six steps of which most lies still; return what was copied for each."""
    process, patch = jax.process_index(), pytest.MonkeyPatch()
    limits.lower(patch, compared_box=1024, other_writers={"cpu": ()})
    rows = spread("line rows", jax.devices(), 2)
    items = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    frozen, local = placed(items, rows), jnp.arange(30.0)
    everywhere = placed(items + 1, spread("line none", jax.devices(), 2))
    with patch.context() as context:
        copied = _copied(context)
        with tr.Run(f"{folder}/run", incremental=True, timeout=_GENEROUS) as run:
            for step in range(1, 7):
                tree = {"frozen": frozen, "trained": placed(items[:, :4] + step, rows), "step": step}
                tree |= {"everywhere": everywhere, "local": local}
                if step == 5 and process == 1:  # its part cannot be linked: what was not copied is fetched now
                    faults.fail(context, os, "link", errno.EMLINK, when=lambda old, new, **_: "data-" in str(new))
                run.save(step, tree)
                if step == 5:
                    frozen.delete()
                    frozen = placed(items, rows)
                run.wait()
    patch.undo()
    return {"copied": copied}
