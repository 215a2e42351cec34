"""A character-level transformer and its Adam, written plainly in jax: what a training state looks like.

The state is an ordinary nested tree: dicts of arrays for the weights, a list of blocks, named tuples for the
optimizer and for the whole, Python numbers for where the run stands.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, Any]


class Config(NamedTuple):
    """The choices that fix the shapes and the steps; saved with the state, so that a load needs nothing else."""

    alphabet_size: int
    """Characters the model knows."""
    context: int = 64
    """Characters it reads at once."""
    width: int = 256
    """Length of the vector that stands for a character."""
    blocks: int = 2
    """Attention and feed-forward pairs."""
    heads: int = 4
    """Attention heads in a block."""
    batch: int = 8
    """Windows in a step."""
    learning_rate: float = 2e-3
    """Adam's step size after warm-up."""
    warmup: int = 10
    """Steps over which the step size grows from zero."""
    dropout: float = 0.05
    """Share of characters that a step hides from the model; it draws from the PRNG key."""
    seed: int = 0
    """Fixes the first weights, the first PRNG key and the order of the windows."""


class AdamState(NamedTuple):
    """What Adam remembers between steps."""

    count: jax.Array  # type: ignore[assignment]
    """Steps taken, int32 of shape ()."""
    mu: Params
    """Running mean of the gradients, shaped like the weights."""
    nu: Params
    """Running mean of the squared gradients, shaped like the weights."""


class TrainState(NamedTuple):
    """Everything that the next step depends on."""

    params: Params
    """The weights."""
    adam: AdamState
    """The optimizer's memory."""
    key: jax.Array
    """Typed PRNG key of shape ()."""
    step: int
    """Steps taken."""
    config: dict[str, int | float]
    """The fields of `Config`."""


def start(config: Config) -> TrainState:
    """Draw the first weights, in numpy, and put everything at its beginning.

    Example:
        >>> state = start(Config(alphabet_size=100, width=16, blocks=1))
        >>> state.step, state.params["blocks"][0]["up"].shape
        (0, (16, 64))
    """
    params = _draw_weights(config)
    adam = AdamState(
        count=np.zeros((), np.int32),  # type: ignore[arg-type]
        mu=jax.tree.map(np.zeros_like, params),
        nu=jax.tree.map(np.zeros_like, params),
    )
    key = jax.random.key(config.seed)
    return TrainState(params=params, adam=adam, key=key, step=0, config=config._asdict())


def loss_and_gradients(params: Params, batch: jax.Array, config: Config, drop: jax.Array) -> tuple[jax.Array, Params]:
    """Return the mean surprise per character in nats, float32 of shape (), and its gradients.

    ``batch`` is int32 of shape (batch, context + 1), ``drop`` a PRNG key.
    """
    return jax.value_and_grad(_loss)(params, batch, config, drop)


def loss_of(state: TrainState, batch: np.ndarray) -> float:
    """Return the loss of the next step from ``state``, computed on one device whatever mesh the state lies on.

    The order of the sums depends on the mesh; on one device it is the same everywhere.
    """
    device = jax.devices()[0]
    config = Config(**state.config)  # type: ignore[arg-type]
    _, drop = jax.random.split(jax.device_put(state.key, device))
    params = jax.device_put(state.params, device)
    return float(_jitted_loss(params, jax.device_put(batch, device), config, drop))


def count_parameters(params: Params) -> int:
    """Count the numbers in the weights.

    Example:
        >>> count_parameters({"kernel": jnp.zeros((3, 4))})
        12
    """
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _draw_weights(config: Config) -> Params:
    # numpy draws: jax would compile one program for each shape, some seconds that a newcomer waits.
    draw = np.random.default_rng(config.seed)
    width = config.width

    def normal(rows: int, columns: int, scale: float) -> np.ndarray:
        return draw.standard_normal((rows, columns), dtype=np.float32) * np.float32(scale)

    def block() -> Params:
        inner, outer = width**-0.5, (2 * config.blocks) ** -0.5
        return {
            "norm_attention": np.ones(width, np.float32),
            "query_key_value": normal(width, 3 * width, inner),
            "attention_out": normal(width, width, inner * outer),
            "norm_feed_forward": np.ones(width, np.float32),
            "up": normal(width, 4 * width, inner),
            "up_bias": np.zeros(4 * width, np.float32),
            "down": normal(4 * width, width, inner * outer / 2),
            "down_bias": np.zeros(width, np.float32),
        }

    return {
        "characters": normal(config.alphabet_size, width, 0.02),
        "pairs": normal(config.alphabet_size**2, width, 0.02),
        "positions": normal(config.context, width, 0.02),
        "blocks": [block() for _ in range(config.blocks)],
        "norm": np.ones(width, np.float32),
    }


def _loss(params: Params, batch: jax.Array, config: Config, drop: jax.Array) -> jax.Array:
    logits = _predict(params, batch[:, :-1], config, drop)
    right = jnp.take_along_axis(jax.nn.log_softmax(logits), batch[:, 1:, None], axis=-1)
    return -jnp.mean(right)


_jitted_loss = functools.partial(jax.jit, static_argnames="config")(_loss)


def _predict(params: Params, tokens: jax.Array, config: Config, drop: jax.Array) -> jax.Array:
    """Give a score to every next character, float32 of shape (batch, context, alphabet)."""
    before = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)))
    pairs = params["pairs"][before * config.alphabet_size + tokens]
    x = params["characters"][tokens] + pairs + params["positions"]
    x = jnp.where(jax.random.bernoulli(drop, 1 - config.dropout, (*tokens.shape, 1)), x, 0)
    for block in params["blocks"]:
        x = x + _attend(block, _normal(x, block["norm_attention"]), config.heads)
        hidden = jax.nn.gelu(_normal(x, block["norm_feed_forward"]) @ block["up"] + block["up_bias"])
        x = x + hidden @ block["down"] + block["down_bias"]
    scores: jax.Array = _normal(x, params["norm"]) @ params["characters"].T
    return scores


def _attend(block: Params, x: jax.Array, heads: int) -> jax.Array:
    batch, length, width = x.shape
    query, key, value = jnp.split((x @ block["query_key_value"]).reshape(batch, length, heads, -1), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * (width // heads) ** -0.5
    seen = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch, length, width)
    attended: jax.Array = mixed @ block["attention_out"]
    return attended


def _normal(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Scale each vector to length one per element; the gain is learned (RMSNorm, arXiv:1910.07467)."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * gain


def adam_step(params: Params, gradients: Params, adam: AdamState, config: Config) -> tuple[Params, AdamState]:
    """Take one step of Adam with bias correction and warm-up (algorithm 1 of arXiv:1412.6980)."""
    count = adam.count + 1
    mu = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, adam.mu, gradients)
    nu = jax.tree.map(lambda old, new: 0.98 * old + 0.02 * new * new, adam.nu, gradients)
    rate = config.learning_rate * jnp.minimum(1.0, count / config.warmup)
    mean_scale, square_scale = 1 / (1 - 0.9**count), 1 / (1 - 0.98**count)

    def moved(weight: jax.Array, mean: jax.Array, square: jax.Array) -> jax.Array:
        return weight - rate * (mean * mean_scale) / (jnp.sqrt(square * square_scale) + 1e-8)

    return jax.tree.map(moved, params, mu, nu), AdamState(count=count, mu=mu, nu=nu)
