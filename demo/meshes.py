"""The training on a mesh of devices: where each array lies, and one step.

Weights and Adam's memory lie in parts, one on each device. A step gathers the weights, computes a share of the batch on
each device, and gives every device its part of the gradients.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from demo import model

AXES = ("data", "model")
"""Names of a mesh's axes."""

# jax leaves these without annotations.
_over: Callable[..., PartitionSpec] = PartitionSpec
_constrained: Callable[[Any, Any], Any] = jax.lax.with_sharding_constraint
_configure: Callable[[str, Any], None] = jax.config.update

RULES = (
    (r"(query_key_value|attention_out|up|down)$", _over("data", "model")),
    (r"(characters|pairs|positions)$", _over(None, ("data", "model"))),
    (r".*", _over()),
)
"""Pattern of a key, and how such an array is cut over the axes of a mesh; the same for every mesh."""

Step = Callable[[model.TrainState, np.ndarray], tuple[model.TrainState, jax.Array]]
"""Takes a state and a batch, gives the next state and the loss; the old state is used up."""


def use_host_devices(count: int) -> None:
    """Let this process see its processor as ``count`` devices; has to come before jax looks for devices."""
    _configure("jax_platforms", "cpu")
    _configure("jax_num_cpu_devices", count)


def mesh_of(*lengths: int) -> Mesh:
    """Make a mesh of the devices of this process, with these lengths along its two axes.

    Example:
        >>> dict(mesh_of(1, 1).shape)
        {'data': 1, 'model': 1}
    """
    count = int(np.prod(lengths))
    return Mesh(np.array(jax.devices()[:count]).reshape(lengths), AXES)


def placed(state: model.TrainState, mesh: Mesh) -> model.TrainState:
    """Put a state's arrays on a mesh, as `RULES` say."""
    params, adam, whole = _shardings(state, mesh)
    return state._replace(
        params=jax.device_put(state.params, params),
        adam=jax.device_put(state.adam, adam),
        key=jax.device_put(state.key, whole),
    )


def stepper(state: model.TrainState, mesh: Mesh) -> Step:
    """Compile nothing yet, but return what takes one step of Adam on that mesh."""
    params_on, adam_on, whole = _shardings(state, mesh)
    batch_on = NamedSharding(mesh, _over(AXES))
    config = model.Config(**state.config)  # type: ignore[arg-type]

    def update(
        params: model.Params, adam: model.AdamState, key: jax.Array, batch: jax.Array
    ) -> tuple[model.Params, model.AdamState, jax.Array, jax.Array]:
        key, drop = jax.random.split(key)
        gathered = _constrained(params, whole)
        loss, gradients = model.loss_and_gradients(gathered, batch, config, drop)
        gradients = _constrained(gradients, params_on)
        params, adam = model.adam_step(params, gradients, adam, config)
        return params, adam, key, loss

    jitted = jax.jit(update, out_shardings=(params_on, adam_on, whole, whole), donate_argnums=(0, 1))

    def step(state: model.TrainState, batch: np.ndarray) -> tuple[model.TrainState, jax.Array]:
        params, adam, key, loss = jitted(state.params, state.adam, state.key, jax.device_put(batch, batch_on))
        return state._replace(params=params, adam=adam, key=key, step=state.step + 1), loss

    return step


def _shardings(state: model.TrainState, mesh: Mesh) -> tuple[Any, model.AdamState, NamedSharding]:
    """Return where weights, Adam's memory, and everything else lie."""

    def on(path: Any, _: Any) -> NamedSharding:
        name = str(path[-1].key)
        return NamedSharding(mesh, next(spec for pattern, spec in RULES if re.search(pattern, name)))

    params = jax.tree_util.tree_map_with_path(on, state.params)
    whole = NamedSharding(mesh, _over())
    return params, model.AdamState(count=whole, mu=params, nu=params), whole  # type: ignore[arg-type]
