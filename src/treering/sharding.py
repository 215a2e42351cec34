"""Shardings for whole trees: by rules over the names of leaves, from the index of a leaves directory, and applied.

The names are those of eformer's ``escale`` and ``sharding_utils``. ``docs/guides/coming-from-eformer.md`` lists the
differences.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from treering._arrays.host import jax_holds
from treering._codec.msgpack.scan import MAX_DEPTH
from treering._leaves.deserialize import create_sharding_tree_from_index
from treering._printable import kind_of, shorten
from treering._tree import placement
from treering._tree.placement import RulesReport, is_placement, require_mesh, spec_of
from treering._tree.registry import has_shape_and_dtype, key_by_text
from treering._tree.state_dict import map_with_path, open_by_key
from treering._values.human import join_first
from treering._values.keys import Trail, join_key, key_name, unwind
from treering._values.telemetry import warn_of
from treering.checkpoint import moved_names
from treering.errors import MismatchError, NotShardedWarning, TooDeepError, TreeringError, UnsupportedError

__all__ = [
    "RulesReport", "apply_sharding_tree", "create_sharding_tree_from_index", "make_itsharded",
    "match_partition_rules", "validate_sharding_tree",
]  # fmt: skip

_SMALL: Final = 16_384


def match_partition_rules(
    rules: Iterable[tuple[str | re.Pattern[str], Any]],
    tree: Any,
    min_size: int | None = 0,
    strict: bool = True,
    *,
    report: Callable[[RulesReport], object] | None = None,
) -> Any:
    """Return ``tree`` with the partition spec of the first rule that matches each leaf.

    A leaf's name is its path from the root, joined by ``/``: keys of mappings, numbers of list items, names of
    fields. A rule matches if its pattern is found in the name (``re.search``).

    Args:
        rules: pairs of a regular expression, text or compiled, and a ``PartitionSpec``.
        tree: any pytree of arrays or of objects with a shape, such as ``jax.ShapeDtypeStruct``. None stays None.
        min_size: arrays of fewer items are replicated, ``PartitionSpec()``, if a rule matches; None means 16,384.
        strict: replicate arrays without axes, whatever the rules say, and cut a spec to the axes of the array.
            Otherwise the rules' values are returned unchanged, and ``min_size`` is ignored.
        report: called with a ``RulesReport``: rules that match no name, and leaves that only a catch-all such as ``.*``
            matches. Without it a ``RulesUnmatchedWarning`` warning reports these, once for the same rules.

    Raises:
        ValueError: no rule matches a leaf; the error names the first such leaf, and how many more there are.
        TypeError: with ``strict``, the rule that matches has no spec.
        re.error: a pattern is not a regular expression.

    Source: eformer.escale.match_partition_rules.

    Example:
        >>> import jax
        >>> from jax.sharding import PartitionSpec as P
        >>> params = {"dense": [jax.ShapeDtypeStruct((8, 4), "float32")], "scale": jax.ShapeDtypeStruct((), "float32")}
        >>> specs = match_partition_rules([("dense/[0-9]+$", P("fsdp", "tp"))], params)
        >>> specs == {"dense": [P("fsdp", "tp")], "scale": P()}
        True
    """
    known = placement.Rules(rules)
    smallest = _SMALL if min_size is None else min_size
    names, unmatched = list[str](), list[str]()

    def specified(path: tuple[str, ...], leaf: Any) -> Any:
        if leaf is None:
            return None
        name = "/".join(path)
        names.append(name)
        shape = tuple(leaf.shape or ()) if has_shape_and_dtype(leaf) else ()
        if strict and not shape:
            return spec_of()
        if (rule := known.rule_for(name)) is not None:
            return placement.fit_spec(name, rule, shape, smallest) if strict else rule[1]
        unmatched.append(name)
        return None

    specs = map_with_path(specified, tree, None)
    if unmatched:
        raise placement.no_rule_error(unmatched)
    known.tell(names, report)
    return specs


_ARRAYS: Final = (jax.Array, np.ndarray, np.generic)
_WIDE: Final = frozenset({"int64", "uint64", "float64", "complex128"})
_SHOWN: Final = 20
_LONGEST: Final = 200


def apply_sharding_tree(arrays: Any, sharding_tree: Any, mesh: Mesh | None = None) -> Any:
    """Return ``arrays`` with each array where ``sharding_tree`` says.

    numpy arrays and scalars become jax arrays of their own memory; leaves that are no arrays stay as they are. An
    array that cannot be laid out so stays where it is, and a warning names it; the others go where they should.

    Args:
        arrays: any pytree: dicts, lists, tuples, namedtuples, registered classes.
        sharding_tree: the same containers, or plain dicts in their place with the same keys as text, with one of
            these for each leaf: a ``Sharding``; a ``PartitionSpec``, meant for ``mesh``; a ``Device``; None, the
            default; or a function of the array that returns one of these, or the new leaf itself. None instead of
            the tree: nothing is done.
        mesh: the default is replicated on it; without one it is this process's first device.

    Raises:
        UnsupportedError: a 64-bit numpy array would have to be cast, because jax_enable_x64 is off; all of them are
            named.
        Exception: whatever a function in ``sharding_tree`` raises.

    Warns:
        NotShardedWarning: the trees differ, and all arrays are returned as they are; or some cannot be laid out as
            wanted.

    Source: eformer.serialization.sharding_utils.apply_sharding_tree.

    Example:
        >>> import jax, numpy as np
        >>> from jax.sharding import Mesh, PartitionSpec as P
        >>> mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
        >>> placed = apply_sharding_tree({"w": np.ones(4, np.float32), "step": 7}, {"w": P("d"), "step": None}, mesh)
        >>> placed["w"].sharding.spec == P("d"), placed["step"]
        (True, 7)
    """
    require_mesh(mesh)
    if sharding_tree is None:
        return arrays
    pairs, unlike = pair_leaves(arrays, sharding_tree)
    if unlike:
        warn_of("arrays and sharding tree differ, so nothing was sharded", unlike, NotShardedWarning)
        return arrays
    steps = [_step(join_key(path), leaf, place, mesh) for path, leaf, place in pairs]
    _require_width(steps)
    # One after the other: the host copy of one numpy array at a time.
    results = iter([_put(step) for step in steps])
    if stayed := [f"{step.key or '.'}: {step.trouble}" for step in steps if step.trouble]:
        warn_of("these arrays cannot have their shardings, and stay as they are", stayed, NotShardedWarning)
    return map_with_path(lambda _path, _leaf: next(results), arrays, None)


@dataclasses.dataclass(slots=True)
class _Step:
    """What becomes of one leaf."""

    key: str
    leaf: Any
    sharding: Any = None
    """Where it goes; None: it stays."""
    trouble: str | None = None
    """Why it stays although it should go."""


def _step(key: str, leaf: Any, place: Any, mesh: Mesh | None) -> _Step:
    if not isinstance(leaf, _ARRAYS):
        return _Step(key, leaf)
    if callable(place) and not isinstance(place, Mesh):  # a mesh decorates functions
        place = place(leaf)
        if not (place is None or is_placement(place)):
            return _Step(key, place)
    if place is None:
        place = SingleDeviceSharding(jax.local_devices()[0]) if mesh is None else NamedSharding(mesh, spec_of())
    if not is_placement(place):
        return _Step(key, leaf, trouble=f"{kind_of(place)} is not a sharding")
    try:
        found = placement.resolve_shardings(place, mesh, {key: placement.aval_of(leaf.shape, leaf.dtype)}, [key])
    except MismatchError as error:
        return _Step(key, leaf, trouble="; ".join(error.differences).removeprefix(f"{key or '.'}: "))
    except UnsupportedError as error:
        error.path = None  # the line names the leaf
        return _Step(key, leaf, trouble=str(error))
    return _Step(key, leaf, sharding=found[key])


def _require_width(steps: list[_Step]) -> None:
    wide = [
        f"{step.key or '.'} ({step.leaf.dtype.name})"
        for step in steps
        if not (step.sharding is None or isinstance(step.leaf, jax.Array))
        and step.leaf.dtype.name in _WIDE
        and not jax_holds(step.leaf.dtype.newbyteorder("="))
    ]
    if wide:
        what = f"jax_enable_x64 is off, and these numpy arrays would be cast: {join_first(wide, _SHOWN)}"
        raise UnsupportedError(what, hint="enable x64, or cast them yourself")


def _put(step: _Step) -> Any:
    if step.sharding is None:
        return step.leaf
    leaf = step.leaf
    if not isinstance(leaf, jax.Array):
        # jax would take the memory as it is, and see what is written there later. It knows no other byte order.
        leaf = np.array(leaf, dtype=leaf.dtype.newbyteorder("="), order="C")
    try:
        leaf = _moved(leaf, step.sharding)
    except (TypeError, ValueError, NotImplementedError) as error:
        step.trouble = str(error)
    except (KeyError, AssertionError) as error:  # of a spec that leaves an axis to jax, or a mesh that others map over
        step.trouble = f"jax cannot put it there ({error!r:.200})"
    return leaf if step.trouble is None else step.leaf


def _moved(leaf: Any, sharding: Any) -> Any:
    # jax takes some arrays to other shards by way of numpy; the user's guard is not against what the user asked for.
    with jax.transfer_guard("allow"):
        return jax.device_put(leaf, sharding)


def validate_sharding_tree(sharding_tree: Any, expected_structure: Any) -> bool:
    """Tell whether ``sharding_tree`` has the structure that `apply_sharding_tree` needs for the other tree.

    None is a leaf, in both. A plain dict stands for any container with the same keys as text, as in the tree that
    `create_sharding_tree_from_index` makes; other containers have to be of one class. Only the structure counts, and
    nothing is raised.

    Source: eformer.serialization.sharding_utils.validate_sharding_tree.

    Example:
        >>> validate_sharding_tree({"layers": {"0": None, "1": None}}, {"layers": [1, 2]})
        True
        >>> validate_sharding_tree({"layers": [None]}, {"layers": [1, 2]})
        False
    """
    return not pair_leaves(expected_structure, sharding_tree)[1]


def make_itsharded(xs: Any, mesh: Mesh) -> Any:
    """Return ``xs`` with every jax array that this process holds whole on all devices of ``mesh``, replicated.

    Everything else stays: numpy arrays, numbers, None, and arrays of which other processes hold a part.

    Raises:
        UnsupportedError: this is no mesh.

    Source: eformer.serialization.sharding_utils.make_itsharded.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np
        >>> from jax.sharding import Mesh
        >>> mesh = Mesh(np.array(jax.devices()), ("d",))
        >>> state = make_itsharded({"w": jnp.ones(3), "step": 7}, mesh)
        >>> state["w"].sharding.is_fully_replicated, state["step"]
        (True, 7)
    """
    require_mesh(mesh)
    if mesh is None:
        raise UnsupportedError("mesh is None, and replicated needs devices", hint="a jax.sharding.Mesh")
    everywhere = NamedSharding(mesh, spec_of())

    def moved(_path: tuple[str, ...], x: Any) -> Any:
        return _moved(x, everywhere) if isinstance(x, jax.Array) and x.is_fully_addressable else x

    return map_with_path(moved, xs, None)


def pair_leaves(tree: Any, places: Any) -> tuple[list[tuple[tuple[str, ...], Any, Any]], list[str]]:
    """Return each leaf of ``tree`` with its path and what ``places`` has for it, and where the two do not agree.

    None is a leaf of both. Containers agree where they are of one class, or one of them is a plain dict, and have the
    same keys, as text: so the dict that a list or a class became in a file stands for that list or class. Static
    fields are not compared.

    Args:
        tree: any pytree.
        places: a tree of anything that is no container, such as shardings or functions.

    Returns:
        The pairs in the order of ``tree``; and one line for each place where the trees differ.

    Example:
        >>> pair_leaves({"a": [1, 2]}, {"a": {"0": "x", "1": None}})
        ([(('a', '0'), 1, 'x'), (('a', '1'), 2, None)], [])
        >>> pair_leaves({"a": 1, "b": 2}, {"a": 3, "c": 4})[1]
        ['b: it has no place', 'c: no leaf is there']
    """
    pairs: list[tuple[tuple[str, ...], Any, Any]] = []
    unlike: list[str] = []
    pending: list[tuple[int, Trail, Any, Any]] = [(0, None, tree, places)]
    while pending:
        depth, trail, x, place = pending.pop()
        try:
            children, below = _children(x), _children(place)
            # A function may be a tree too, as a module of equinox is: where an array is, it is a function.
            if children is None and (below is None or callable(place)):
                pairs.append((unwind(trail), x, place))
                continue
            if depth > MAX_DEPTH:
                raise TooDeepError(f"more than {MAX_DEPTH} containers deep; it may hold itself")
            alike = type(x) is type(place) or dict in (type(x), type(place))
            if children is None or below is None or not alike:
                what, where = (kind_of(a) if b is not None else "a leaf" for a, b in ((x, children), (place, below)))
                unlike.append(f"{_shown(trail)}: {what}, and its place is {where}")
                continue
            if children.keys() != below.keys():  # a tree read from a file has the text of each key
                children, below = key_by_text(children), key_by_text(below)
        except TreeringError as error:
            unlike.append(f"{_shown(trail)}: {error}")
            continue
        unlike += [f"{_shown((trail, str(key)))}: it has no place" for key in children if key not in below]
        unlike += [f"{_shown((trail, str(key)))}: no leaf is there" for key in below if key not in children]
        both = [key for key in children if key in below]
        pending.extend((depth + 1, (trail, str(key)), children[key], below[key]) for key in reversed(both))
    return pairs, unlike


def _children(x: Any) -> Mapping[Any, Any] | None:
    """Return the children of a container by key; None for a leaf."""
    opened = None if x is None or is_placement(x) else open_by_key(x)
    return None if opened is None else opened[0]


def _shown(trail: Trail) -> str:
    return shorten(key_name(join_key(unwind(trail))), _LONGEST)


if not TYPE_CHECKING:  # a type checker is to refuse the old name
    __getattr__ = moved_names(__name__, "Shardings")
