"""Training loops as people write them: trained, saved as they go on, taken up by another ``Run``; no bit is lost."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import treering as tr

LAST = 7
BATCHES = jnp.asarray(np.random.default_rng(9).standard_normal((LAST + 1, 16, 8), np.float32))


def target(x: jax.Array) -> jax.Array:
    return jnp.sin(x.sum(axis=-1, keepdims=True))


def bits(loss: Any) -> bytes:
    """Return a loss as its bytes: equal bits are asked for, not close numbers."""
    return np.asarray(loss).tobytes()


# ----------------------------------------------------------------------------------------------------- plain jax, optax


OPTIMIZER = optax.adamw(1e-2)


def fresh() -> dict[str, Any]:
    first, second = jax.random.split(jax.random.key(0))
    params = {"up": jax.random.normal(first, (8, 32)), "down": jax.random.normal(second, (32, 1))}
    return {"params": params, "opt": OPTIMIZER.init(params), "key": jax.random.key(1), "step": jnp.zeros((), jnp.int32)}


# The loop that makes async saves hard: each step gives the old state's memory away.
@partial(jax.jit, donate_argnums=0)
def train_step(state: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    key, noise = jax.random.split(state["key"])

    def loss_of(params: dict[str, jax.Array]) -> jax.Array:
        noisy = x + 0.01 * jax.random.normal(noise, x.shape)
        return jnp.mean((jnp.tanh(noisy @ params["up"]) @ params["down"] - target(x)) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt, "key": key, "step": state["step"] + 1}, loss


def test_plain_jax_and_optax_with_a_state_that_each_step_donates(tmp_path: Path) -> None:
    state, losses = fresh(), {}
    with tr.Run(tmp_path / "run", keep=tr.KeepLast(2)) as run:
        for step in range(1, LAST + 1):
            state, loss = train_step(state, BATCHES[step])
            losses[step] = bits(loss)
            if step < LAST:
                run.save(step, state, metrics={"loss": loss})
            if step == 2:
                assert run.metrics(2) == {"loss": float(loss)}  # it may be in flight still

    again = tr.Run(tmp_path / "run")
    assert again.steps() == [LAST - 2, LAST - 1]
    found, state = again.load_or_init(fresh)
    assert found == LAST - 1
    assert type(state["opt"]) is type(fresh()["opt"])
    assert bits(train_step(state, BATCHES[LAST])[1]) == losses[LAST]
    # From the step before it, as somebody would who wants to see what happened there.
    earlier = again.load(LAST - 2, like=fresh())
    assert bits(train_step(earlier, BATCHES[LAST - 1])[1]) == losses[LAST - 1]
    assert bits(again.metrics(LAST - 1)["loss"]) == bits(float(np.frombuffer(losses[LAST - 1], np.float32)[0]))


def test_eight_devices_whose_arrays_come_back_where_they_were(tmp_path: Path) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spread = {"up": PartitionSpec(None, "model"), "down": PartitionSpec("model")}

    def sharding(key: str, aval: jax.ShapeDtypeStruct) -> NamedSharding:
        named = spread.get(key.rsplit("/", 1)[-1], PartitionSpec())
        return NamedSharding(mesh, named if len(aval.shape) == 2 else PartitionSpec())

    with tr.Run(tmp_path / "run") as run:
        step, state = run.load_or_init(fresh, shardings=sharding)
        assert step is None
        x = jax.device_put(BATCHES, NamedSharding(mesh, PartitionSpec(None, "data")))
        state, _ = train_step(state, x[0])
        run.save(1, state)
        _, expected = train_step(state, x[1])

    with tr.Run(tmp_path / "run") as run:
        step, state = run.load_or_init(fresh, shardings=sharding)
    assert step == 1
    assert state["params"]["up"].sharding == sharding("params/up", state["params"]["up"])
    assert state["opt"][0].mu["down"].sharding == sharding("opt/0/mu/down", state["params"]["down"])
    assert bits(train_step(state, x[1])[1]) == bits(expected)


# ------------------------------------------------------------------------------------------------------------- flax nnx


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(8, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.down = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))


def model_and_optimizer(seed: int) -> tuple[Net, nnx.Optimizer[Net]]:
    model = Net(nnx.Rngs(seed))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


@nnx.jit
def nnx_step(model: Net, optimizer: nnx.Optimizer[Net], x: jax.Array) -> jax.Array:
    def loss_of(model: Net) -> jax.Array:
        return jnp.mean((model(x) - target(x)) ** 2)

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


@pytest.mark.slow
def test_flax_nnx_with_batch_statistics_and_the_counters_of_dropout(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer(0)
    with tr.Run(tmp_path / "run") as run:
        for step in range(1, 4):
            nnx_step(model, optimizer, BATCHES[step])
            run.save(step, (model, optimizer))
        expected = [bits(nnx_step(model, optimizer, BATCHES[step])) for step in (4, 5)]

    model, optimizer = model_and_optimizer(1)  # other numbers: what is equal afterwards was loaded
    with tr.Run(tmp_path / "run") as run:
        model, optimizer = run.load(like=(model, optimizer))
    assert [bits(nnx_step(model, optimizer, BATCHES[step])) for step in (4, 5)] == expected


# ---------------------------------------------------------------------------------------------------- linen, TrainState


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(1)(linen.tanh(linen.Dense(32)(x)))


def train_state(seed: int = 0) -> TrainState:
    net = LinenNet()
    params = net.init(jax.random.key(seed), BATCHES[0])["params"]
    return TrainState.create(apply_fn=net.apply, params=params, tx=optax.adam(1e-2))


@jax.jit
def linen_step(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss_of(params: Any) -> jax.Array:
        return jnp.mean((state.apply_fn({"params": params}, x) - target(x)) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


def test_linen_and_its_train_state(tmp_path: Path) -> None:
    state = train_state()
    with tr.Run(tmp_path / "run") as run:
        for step in range(1, 4):
            state, _ = linen_step(state, BATCHES[step])
            run.save(step, state)
        _, expected = linen_step(state, BATCHES[4])

    with tr.Run(tmp_path / "run") as run:
        state = run.load(like=train_state(seed=1))
    assert isinstance(state, TrainState)
    assert int(state.step) == 3
    assert bits(linen_step(state, BATCHES[4])[1]) == bits(expected)


# -------------------------------------------------------------------------------------------------------------- equinox


def fresh_module(seed: int = 0) -> dict[str, Any]:
    model = eqx.nn.MLP(8, 1, 32, 2, activation=jax.nn.gelu, key=jax.random.key(seed))
    return {"model": model, "opt": OPTIMIZER.init(eqx.filter(model, eqx.is_array))}


@eqx.filter_jit
def equinox_step(state: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    @eqx.filter_value_and_grad
    def loss_of(model: eqx.nn.MLP) -> jax.Array:
        return jnp.mean((jax.vmap(model)(x) - target(x)) ** 2)

    loss, grads = loss_of(state["model"])
    updates, opt = OPTIMIZER.update(grads, state["opt"], eqx.filter(state["model"], eqx.is_array))
    return {"model": eqx.apply_updates(state["model"], updates), "opt": opt}, loss


@pytest.mark.slow
def test_equinox_whose_model_holds_functions_too(tmp_path: Path) -> None:
    state = fresh_module()
    with tr.Run(tmp_path / "run") as run:
        for step in range(1, 4):
            state, _ = equinox_step(state, BATCHES[step])
            run.save(step, state)
        _, expected = equinox_step(state, BATCHES[4])

    # Nothing is computed for the template: its arrays are abstract, its functions are the program's.
    like = eqx.filter_eval_shape(fresh_module, 1)
    with tr.Run(tmp_path / "run") as run:
        state = run.load(like=like)
    assert state["model"].activation is like["model"].activation
    assert bits(equinox_step(state, BATCHES[4])[1]) == bits(expected)


# ------------------------------------------------------------------------------------------------------ a data iterator


class Batches(Iterator[np.ndarray[Any, Any]]):
    """Rows in an order that is drawn anew for each epoch; where it stands is its state."""

    def __init__(self, rows: np.ndarray[Any, Any], size: int, seed: int) -> None:
        self.rows, self.size = rows, size
        self.random = np.random.default_rng(seed)
        self.order, self.at = self.random.permutation(len(rows)), 0

    def __next__(self) -> np.ndarray[Any, Any]:
        if self.at + self.size > len(self.rows):
            self.order, self.at = self.random.permutation(len(self.rows)), 0
        self.at += self.size
        return self.rows[self.order[self.at - self.size : self.at]]

    def get_state(self) -> dict[str, Any]:
        return {"random": self.random.bit_generator.state, "order": self.order, "at": self.at}

    def set_state(self, state: dict[str, Any]) -> None:
        self.random.bit_generator.state = state["random"]
        self.order, self.at = state["order"], state["at"]


ROWS = np.random.default_rng(3).normal(size=(40, 8)).astype(np.float32)


@pytest.mark.parametrize("stopped", [2, 3], ids=["in the midst of an epoch", "at its end"])
def test_a_data_iterator_goes_on_with_the_batch_that_was_next(tmp_path: Path, stopped: int) -> None:
    config = {"rate": 1e-2, "layers": (8, 32, 1)}
    state, data = fresh(), Batches(ROWS, 12, seed=0)
    with tr.Run(tmp_path / "run") as run:
        for step in range(1, stopped + 1):
            state, _ = train_step(state, next(data))
            run.save(step, {"state": state, "data": data, "config": config})
        expected = []
        for _ in range(4):
            state, loss = train_step(state, next(data))
            expected.append(bits(loss))

    data = Batches(ROWS, 12, seed=1)
    with tr.Run(tmp_path / "run") as run:
        like: dict[str, Any] = {"state": fresh(), "data": data, "config": config}
        items = run.load(like=like)
    assert items["data"] is data
    assert items["config"] == config
    state, losses = items["state"], []
    for _ in range(4):
        state, loss = train_step(state, next(items["data"]))
        losses.append(bits(loss))
    assert losses == expected


def test_a_loop_of_one_call_resumes_its_iterator_too(tmp_path: Path) -> None:
    def begun() -> dict[str, Any]:
        return {"state": fresh(), "data": Batches(ROWS, 12, seed=0)}

    def trained(steps: int) -> list[bytes]:
        losses = []
        with tr.Run(tmp_path / "run") as run:
            last, items = run.load_or_init(begun)
            for step in range(0 if last is None else last + 1, steps):
                items["state"], loss = train_step(items["state"], next(items["data"]))
                run.save(step, items)
                losses.append(bits(loss))
        return losses

    stopped = trained(2) + trained(6)
    assert len(stopped) == 6
    items = begun()
    expected = []
    for _ in range(6):
        items["state"], loss = train_step(items["state"], next(items["data"]))
        expected.append(bits(loss))
    assert stopped == expected


def test_an_iterator_that_was_added_to_the_loop_begins_at_its_start(tmp_path: Path) -> None:
    with tr.Run(tmp_path / "run") as run:
        run.save(1, {"state": fresh()})
        run.wait()
        data = Batches(ROWS, 12, seed=1)
        with pytest.warns(tr.errors.LeavesInitialisedWarning, match="data"):
            resumed = run.load_or_init(lambda: {"state": fresh(), "data": data})
    assert resumed.initialised == ("data",)
    assert resumed.tree["data"] is data


def test_an_iterator_is_left_as_it_is_where_the_state_beside_it_does_not_fit(tmp_path: Path) -> None:
    with tr.Run(tmp_path / "run") as run:
        run.save(1, {"state": fresh(), "data": Batches(ROWS, 12, seed=0)})

    data = Batches(ROWS, 12, seed=1)
    first = data.get_state()
    other = fresh() | {"ema": jnp.zeros(3)}
    with tr.Run(tmp_path / "run") as run, pytest.raises(tr.errors.MismatchError, match="state/ema: missing"):
        run.load(like={"state": other, "data": data})
    assert data.get_state()["random"] == first["random"]
    assert np.array_equal(data.order, first["order"])
