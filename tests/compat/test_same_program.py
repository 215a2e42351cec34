"""A user's program runs unchanged, line for line, when its import of flax.serialization is swapped for ours."""

from __future__ import annotations

import functools
import sys
from typing import Any

import flax
import pytest
from flax import serialization as flax_serialization

from treering import serialization as ours

FLAX = "from flax import serialization"
OURS = "from treering import serialization"

TRAINING = """
from flax import serialization
import flax.linen as nn, jax, jax.numpy as jnp, optax
from flax.training import train_state

class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.relu(nn.Dense(4)(x)))

net = Net()
x = jnp.arange(6.0).reshape(3, 2)

def create(seed):
    return train_state.TrainState.create(
        apply_fn=net.apply, params=net.init(jax.random.PRNGKey(seed), x)["params"],
        tx=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)))

@jax.jit
def step(state):
    grads = jax.grad(lambda p: jnp.mean(state.apply_fn({"params": p}, x) ** 2))(state.params)
    return state.apply_gradients(grads=grads)

state = step(step(create(0)))
saved = serialization.to_bytes(state)
log.append(saved)
restored = serialization.from_bytes(create(1), saved)
log.append(jax.tree.structure(restored) == jax.tree.structure(state))
log.append([type(leaf).__name__ for leaf in jax.tree.leaves(restored)])
log.append(serialization.to_bytes(step(restored)) == serialization.to_bytes(step(state)))
log.append(serialization.to_bytes(restored.opt_state))
log.append(sorted(serialization.to_state_dict(state)))
"""

CUSTOM = """
from flax import serialization
import numpy as np

class Counter:
    def __init__(self, count, extra):
        self.count, self.extra = count, extra

def counter_to(c):
    return {"count": c.count, "extra": serialization.to_state_dict(c.extra)}

def counter_from(c, state):
    log.append(serialization.current_path())
    return Counter(state["count"], serialization.from_state_dict(c.extra, state["extra"], name="extra"))

serialization.register_serialization_state(Counter, counter_to, counter_from)
try:
    serialization.register_serialization_state(Counter, counter_to, counter_from)
except ValueError as error:
    log.append(str(error))
serialization.register_serialization_state(Counter, counter_to, counter_from, override=True)
log.append([serialization.is_serializable(thing) for thing in (Counter, Counter(1, 2), dict, [], (), object(), object)])
data = serialization.to_bytes({"c": [Counter(3, (np.arange(2), {}))]})
log.append(data)
back = serialization.from_bytes({"c": [Counter(0, (0, {}))]}, data)["c"][0]
log.append((back.count, type(back.extra).__name__, back.extra[0].tolist()))
"""

ERRORS = """
from flax import serialization
import collections, numpy as np
from flax.core import freeze

Foo = collections.namedtuple("Foo", "a b")
cases = [
    ([1, 2], {"0": 1}), ({"a": [1]}, {"a": {}}), ({"a": {"b": 1}}, {"a": {}}), (Foo(1, 2), {"a": 1, "b": 2}),
    (Foo(1, [2]), {"name": "Foo", "fields": {"0": "a", "1": "b"}, "values": {"0": 7, "1": {"0": 8}}}),
    (freeze({"a": {"b": 1}}), {"a": {}}), ({3: 0}, {"3": 1, "4": 2}), ((), {}), (None, 5), ([0], {"0": "x"}),
]
for target, state in cases:
    try:
        log.append(repr(serialization.from_state_dict(target, state)))
    except ValueError as error:
        log.append(str(error))
    except (AttributeError, TypeError, KeyError, AssertionError) as error:
        log.append("caught")
for bad in (object(), {1, 2}, 2**70, [lambda: 0]):
    try:
        serialization.to_bytes({"bad": bad})
    except (TypeError, OverflowError) as error:
        log.append("caught")
for bad in (b"", b"\\xc1", b"\\x93", b"\\xa5ab", b"\\x00\\x00", b"\\xd4\\x01\\xc1"):
    try:
        serialization.msgpack_restore(bad)
    except ValueError:
        log.append("caught")
"""

EMPTY = """
from flax import serialization
import numpy as np

empty = (b"", "", [], (), {}, None)
states = (*empty, 0, b"a", np.zeros(0), np.zeros(()), np.zeros((0, 2)), {"a": b""}, {"0": b""}, {"0": 1})
for target in ((), [], {}, {"a": ()}, ((),), ([], ())):
    for state in states:
        try:
            log.append(repr(serialization.from_state_dict(target, state)))
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            log.append("caught")
"""

LOW_LEVEL = """
from flax import serialization
import jax.numpy as jnp, numpy as np

tree = {"b": [np.arange(3), 2j, None], "a": {"x": jnp.ones((2, 2), jnp.bfloat16), "s": np.float16(2)}}
log.append(serialization.msgpack_serialize(tree))
log.append(serialization.msgpack_serialize(dict(tree), in_place=True))
back = serialization.msgpack_restore(encoded_pytree=serialization.msgpack_serialize(pytree=tree))
log.append((list(back), str(back["a"]["x"].dtype), type(back["a"]["s"]).__name__, back["b"][1]))
old = serialization.MAX_CHUNK_SIZE
serialization.MAX_CHUNK_SIZE = 64
try:
    log.append(serialization.to_bytes({"big": np.arange(100)}))
    log.append(serialization.from_bytes(target=None, encoded_bytes=log[-1])["big"].tolist())
finally:
    serialization.MAX_CHUNK_SIZE = old
log.append(serialization.from_state_dict(target=[0], state={"0": 1}, name="here"))
log.append(serialization.current_path())
"""


def run(program: str, **given: Any) -> list[Any]:
    """Run ``program`` and return what it wrote into ``log``."""
    log: list[Any] = []
    exec(compile(program, "program", "exec"), {"__name__": __name__, "log": log, **given})
    return log


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "program",
    [TRAINING, CUSTOM, ERRORS, EMPTY, LOW_LEVEL],
    ids=["training", "custom types", "errors", "empty", "low level"],
)
def test_the_same_program_gives_the_same_log(program: str) -> None:
    assert program.count(FLAX) == 1
    assert run(program.replace(FLAX, OURS)) == run(program)


BEFORE = """
class Old:
    def __init__(self, x):
        self.x = x

flax_serialization.register_serialization_state(
    Old, lambda o: {"x": flax_serialization.to_state_dict(o.x)},
    lambda o, s: Old(flax_serialization.from_state_dict(o.x, s["x"], name="x")))
"""

AFTER = """
from flax import serialization, struct
import numpy as np

@struct.dataclass
class New:
    a: object
    b: object

tree = {"old": [Old((1, {}))], "new": New(np.arange(3), (Old(2),))}
log.append(serialization.to_bytes(tree))
back = serialization.from_bytes({"old": [Old((0, {}))], "new": New(0, (Old(0),))}, log[-1])
log.append((back["old"][0].x, back["new"].a.tolist(), back["new"].b[0].x))
log.append([serialization.is_serializable(thing) for thing in (Old, New, int, object)])
try:
    serialization.from_bytes({"old": [Old((0, {}, 1))], "new": New(0, (Old(0),))}, log[0])
except ValueError as error:
    log.append("caught")
"""


def wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    return wrapper


@pytest.mark.parametrize(
    ("way", "program"),
    [
        ("functions", CUSTOM),
        ("functions", ERRORS),
        ("functions", AFTER),
        ("wrapped", AFTER),
        ("some", AFTER),
        ("module", CUSTOM),
    ],
    ids=["types", "errors", "registered", "wrapped", "some", "module"],
)
def test_flax_whose_functions_are_ours_gives_the_same_log(
    program: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: dict[str, Any] = {"flax_serialization": flax_serialization}
    exec(BEFORE, before)
    given = {"Old": before["Old"]}
    want = run(program, **given)
    names = [name for name in ours.__all__ if callable(getattr(flax_serialization, name, None))]
    assert len(names) == 9
    if way == "module":
        monkeypatch.setattr(flax, "serialization", ours)
        monkeypatch.setitem(sys.modules, "flax.serialization", ours)
    for name in names if way in ("functions", "wrapped") else ("to_state_dict", "from_state_dict", "to_bytes"):
        function = getattr(ours, name)
        monkeypatch.setattr(flax_serialization, name, wrapped(function) if way == "wrapped" else function)
    assert run(program, **given) == want


@pytest.mark.parametrize(
    "name",
    [
        "MAX_CHUNK_SIZE",
        "current_path",
        "from_bytes",
        "from_state_dict",
        "is_serializable",
        "msgpack_restore",
        "msgpack_serialize",
        "register_serialization_state",
        "to_bytes",
        "to_state_dict",
    ],
)
def test_every_public_name_takes_flax_s_arguments(name: str) -> None:
    import inspect

    import flax.serialization

    import treering.serialization

    theirs, ours = getattr(flax.serialization, name), getattr(treering.serialization, name)
    if not callable(theirs):
        assert ours == theirs
        return
    wanted = list(inspect.signature(theirs).parameters.values())
    given = list(inspect.signature(ours).parameters.values())
    assert [(p.name, p.default) for p in given[: len(wanted)]] == [(p.name, p.default) for p in wanted]
    assert all(p.kind is p.KEYWORD_ONLY for p in given[len(wanted) :])
