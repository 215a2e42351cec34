"""Pytree -> state dict, and back: nested plain dicts with str keys around leaves, as flax.serialization defines them.

The walks keep their own stacks, so depth is bounded by memory and not by Python's recursion limit. Those over any
pytree keep the order of its dicts, which jax's own functions sort. Messages and error classes are those that
flax.serialization's callers know.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import jax
import numpy as np

from treering._codec.msgpack.scan import MAX_DEPTH
from treering._printable import MOST_LINES, kind_of, list_lines, printable, shorten
from treering._tree import registry
from treering._tree.registry import LEAF_TYPES, REGISTRY, Node, is_code, is_namedtuple, is_typed_key, open_pytree_node
from treering._values.human import build_mismatch, near, pluralize
from treering._values.keys import Trail, key_name, unwind
from treering.errors import MismatchError, TooDeepError, TreeringError, UnsupportedError

_LONGEST_KEY: Final = 400
_COMPARED: Final = 1000  # names that are compared for likeness, which takes time with the square
_PYTHON_LEAVES: Final = (bool, int, float, complex, str, bytes)


class NotStringKeyError(UnsupportedError, AssertionError):
    """flax asserts that a handler's keys are str."""


def to_state_dict(target: Any) -> Any:
    """Return the state of ``target`` as nested dicts with str keys; a leaf is returned as it is.

    dicts keep their order and their keys' text; lists and tuples become ``{"0": .., "1": ..}``; namedtuples,
    dataclasses and other pytree nodes give their fields. Static fields are left out, a function below a registered
    class becomes None (``from_state_dict`` takes both from its target), and a typed PRNG key gives its uint32 data.
    Arrays are not copied.

    Raises:
        UnsupportedError: keys that are alike as text, a handler's key that is no str, more than 131,072 levels.

    Source: flax.serialization.to_state_dict.

    Example:
        >>> to_state_dict({"a": [1, 2], 3: (None,)})
        {'a': {'0': 1, '1': 2}, '3': {'0': None}}
    """
    state, refused = partial_state_dict(target)
    if refused:
        raise refused[0]
    return state


def partial_state_dict(target: Any) -> tuple[Any, list[TreeringError]]:
    """Return the state dict with None for every branch that was refused, and why each was."""
    keys: list[str] = []
    refused: list[TreeringError] = []
    root: dict[str, Any] = {}
    frames: list[tuple[Iterator[tuple[str, Any]], dict[str, Any], bool]] = [(iter([("", target)]), root, False)]
    while frames:
        pairs, out, in_class = frames[-1]
        for key, value in pairs:
            if type(value) in LEAF_TYPES:
                out[key] = value
                continue
            keys.append(key)
            try:
                opened = _open_value(value, in_class, len(frames))
            except TreeringError as error:
                error.path = error.path or tuple(keys[1:])
                refused.append(error)
                if isinstance(error, TooDeepError):  # a tree that holds itself has no end
                    return None, refused
                opened = [None]
            if type(opened) is tuple:
                inner: dict[str, Any] = {}
                out[key] = inner
                frames.append((iter(opened[0]), inner, opened[1]))
                break
            out[key] = opened[0]
            keys.pop()
        else:
            frames.pop()
            if keys:
                keys.pop()
    return root[""], refused


def _open_value(value: Any, in_class: bool, depth: int) -> tuple[Iterable[tuple[str, Any]], bool] | list[Any]:
    """Return a container's pairs (and whether they stand below a class), or the finished value in a list of one."""
    if depth > MAX_DEPTH:
        raise TooDeepError(f"the tree is more than {MAX_DEPTH} containers deep; it may hold itself")
    kind = type(value)
    if (entry := REGISTRY.get(kind)) is not None:
        return [_from_handler(entry[0](value))]
    if (pairs_of := _PAIRS.get(kind)) is not None:
        return pairs_of(value), in_class
    if is_namedtuple(value):
        return [(field, getattr(value, field)) for field in value._fields], in_class
    if is_typed_key(value):
        return [jax.random.key_data(value)] if isinstance(value, jax.Array) else [value]
    node = None if registry.flax_overrides(kind) else open_pytree_node(value)
    if node is not None:
        return node.children.items(), in_class or node.kind != "mapping"
    if registry.flax_serves(kind):
        return [_from_handler(registry.flax_state(value))]
    return [None if in_class and is_code(value) else value]


def _from_handler(state: Any) -> Any:
    if isinstance(state, dict):
        for key in state:
            if not isinstance(key, str):
                raise NotStringKeyError(f"A state dict must only have string keys. Found {key!r:.80}")
    return state


_PAIRS: Final[dict[type, Callable[[Any], Iterable[tuple[str, Any]]]]] = {
    dict: lambda xs: (xs if all(type(key) is str for key in xs) else registry.key_by_text(xs)).items(),
    list: lambda xs: ((str(index), value) for index, value in enumerate(xs)),
    tuple: lambda xs: ((str(index), value) for index, value in enumerate(xs)),
    # The function comes from the target.
    jax.tree_util.Partial: lambda partial: [("args", partial.args), ("keywords", partial.keywords)],
}


def require_match(target: Any, state: Any) -> None:
    """Raise where ``state`` would change structure, shape or dtype of ``target``.

    Raises:
        MismatchError: with ``differences``, one line for each.

    Example:
        >>> import numpy as np
        >>> require_match({"w": np.zeros(2)}, {"w": np.zeros(3), "b": 1})
        Traceback (most recent call last):
            ...
        treering.errors.MismatchError: 2 differences between the target and the data:
          b: unexpected, the data has int
          w: wanted float64[2], found float64[3]
    """
    found = differences(target, state) if target is not None else []
    if found:
        count = pluralize(len(found), "differences")
        raise build_mismatch(f"{count} between the target and the data:{list_lines(found)}", found)


def differences(target: Any, state: Any) -> list[str]:
    """Return one line for each difference in structure, shape or dtype, sorted by key path."""
    unlike: dict[tuple[str, ...], str] = {}
    missing: dict[tuple[str, ...], str] = {}
    unexpected: dict[tuple[str, ...], str] = {}
    pending: list[tuple[Trail, Any, Any]] = [(None, to_state_dict(target), state)]
    while pending:
        trail, wanted, found = pending.pop()
        if not (isinstance(wanted, dict) and isinstance(found, dict)):
            wanted_text, found_text = _describe(wanted), _describe(found)
            if wanted_text != found_text:
                unlike[unwind(trail)] = f"wanted {wanted_text}, found {found_text}"
            continue
        modern = registry.modernize_namedtuple(found, wanted)
        found = found if modern is None else modern
        missing |= {unwind((trail, str(key))): _describe(wanted[key]) for key in wanted.keys() - found.keys()}
        for key in found.keys() - wanted.keys():
            unexpected[unwind((trail, str(key)))] = _describe(found[key])
        pending.extend(((trail, str(key)), wanted[key], found[key]) for key in wanted.keys() & found.keys())
    lines = unlike | {path: f"unexpected, the data has {kind}" for path, kind in unexpected.items()}
    others = {"/".join(path): kind for path, kind in unexpected.items()}
    for number, (path, kind) in enumerate(sorted(missing.items())):
        close = suggest("/".join(path), kind, others, " in the data") if number < MOST_LINES else ""
        lines[path] = f"missing, the target has {kind}{close}"
    return [f"{shown_key('/'.join(path))}: {lines[path]}" for path in sorted(lines)]


def suggest(key: str, kind: str, others: Mapping[str, str], where: str = "") -> str:
    """Name the key that was probably meant: the most alike one whose leaf is of the same kind."""
    alike = (other for other, found in others.items() if found == kind)
    close = near(key, itertools.islice(alike, _COMPARED), cutoff=0.5)
    return f" (is it {shown_key(close)!r}{where}?)" if close else ""


def shown_key(key: str) -> str:
    """Cut a key from a file to a length for people, and escape what could move a cursor."""
    return printable(shorten(key_name(key), _LONGEST_KEY))


def _describe(leaf: Any) -> str:
    """Return what must agree: dtype and shape of an array, the type of a Python leaf."""
    if isinstance(leaf, dict):
        return f"a branch of {len(leaf)}"
    if is_typed_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
        return f"{data.dtype.name}{list(data.shape)}"
    if registry.has_shape_and_dtype(leaf):
        return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
    if leaf is None:
        return "None"
    if isinstance(leaf, bytearray | memoryview):
        return "bytes"
    return type(leaf).__name__ if type(leaf) in _PYTHON_LEAVES else kind_of(leaf)


def leaves_of(tree: Any) -> Iterator[Any]:
    """Yield the leaves in the order of the tree; None is no leaf.

    Raises:
        TooDeepError: more levels than a file may have; the tree may hold itself.

    Example:
        >>> list(leaves_of({"b": [1, None], "a": (2,)}))
        [1, 2]
    """
    pending = [(0, tree)]
    while pending:
        depth, x = pending.pop()
        if type(x) in LEAF_TYPES:
            if x is not None:
                yield x
            continue
        if (opened := open_by_key(x)) is None:
            yield x
        elif depth > MAX_DEPTH:
            raise TooDeepError(f"the tree is more than {MAX_DEPTH} containers deep; it may hold itself")
        else:
            pending.extend((depth + 1, child) for child in reversed(opened[0].values()))


def open_by_key(x: Any) -> tuple[dict[Any, Any], Callable[[list[Any]], Any]] | None:
    """Return a node's children by key, and what makes such a node of other children; None for a leaf."""
    if type(x) is dict:
        return x, lambda mapped: dict(zip(x, mapped, strict=True))
    try:
        node = open_pytree_node(x)
    except UnsupportedError:
        if not isinstance(x, Mapping):
            raise
        # Keys that are alike as text, which only a state dict cannot hold.
        return dict(x), lambda mapped: type(x)(dict(zip(x, mapped, strict=True)))  # type: ignore[call-arg]
    return None if node is None else (node.children, node.rebuild)


def structure_text(tree: Any) -> str:
    """Return jax's text of the tree's structure, or why jax has none for it."""
    try:
        return str(jax.tree.structure(tree))
    except (TypeError, ValueError) as error:  # dict keys that jax cannot sort
        return f"no jax structure: {error}"
    except (RecursionError, SystemError):  # jax recurses in C++, whose binding turns the one into the other
        return "no jax structure: nested too deep for jax"


def map_with_path(
    f: Callable[[tuple[str, ...], Any], Any],
    tree: Any,
    is_leaf: Callable[[Any], bool] | None,
    text: Callable[[Any], str] = str,
) -> Any:
    """Return ``tree`` with ``f(path, leaf)`` for each leaf, called in order; None is a leaf.

    ``text`` makes the parts of paths of dict keys.
    """
    root: list[Any] = []
    # Each step maps one child into its parent's results, or rebuilds a node whose children are all mapped.
    steps: list[tuple[list[Any], Any, Trail, Callable[[list[Any]], Any] | None]] = [(root, tree, None, None)]
    around: dict[int, Any] = {}  # the nodes themselves too, so that no id is given anew
    while steps:
        into, x, trail, rebuild = steps.pop()
        if rebuild is not None:
            into.append(rebuild(x))
            around.popitem()
            continue
        stops = x is None or (is_leaf is not None and is_leaf(x))
        opened = None if stops else open_by_key(x)
        if opened is None:
            into.append(f(unwind(trail), x))
            continue
        if id(x) in around:
            raise TooDeepError(f"{kind_of(x)} holds itself", path=unwind(trail))
        around[id(x)] = x
        children, remake = opened
        mapped: list[Any] = []
        steps.append((into, mapped, trail, remake))
        steps.extend((mapped, child, (trail, text(part)), None) for part, child in reversed(children.items()))
    return root[0]


_LONGEST_NAMES: Final = 2000


@dataclasses.dataclass(slots=True)
class _Restorer:
    """A container whose children are being restored."""

    children: Iterator[tuple[str, Any]]
    """The name and the target of each that is still to come."""
    state: Any
    """A dict."""
    rebuild: Callable[[list[Any]], Any]
    """Makes the container of its children."""
    absent: Callable[[str], Exception] | None = None
    """Makes the error for a child that the state does not have; None where it is known to have all."""
    in_class: bool = False
    """Whether it is the node of a class, or stands below one."""
    restored: list[Any] = dataclasses.field(default_factory=list)
    """The children so far."""


class _CurrentPath(threading.local):
    """Where this thread's restore is."""

    def __init__(self) -> None:
        self.names: list[str] = []


_place = _CurrentPath()


class StructureMismatchError(MismatchError):
    """The message already says the path, in flax's words."""

    def __str__(self) -> str:
        return printable(self.message if self.hint is None else f"{self.message}; {self.hint}")


class NotADictError(StructureMismatchError, AttributeError):
    """flax raises AttributeError where a dict's state is no dict."""


class NotItemsError(StructureMismatchError, TypeError):
    """flax raises TypeError where a list's state is no dict."""


class AbsentItemError(StructureMismatchError, KeyError):
    """flax raises KeyError where a numbered or named part is absent."""


def current_path() -> str:
    """Return where this thread's ``from_state_dict`` is, as ``./a/b``; empty outside of one. For error messages.

    Example:
        >>> current_path()
        ''
    """
    return "/".join(_place.names)


def from_state_dict(target: Any, state: Any, name: str = ".") -> Any:
    """Return a copy of ``target``'s structure with the leaves of ``state``.

    Leaves of ``target`` are not compared with what replaces them (see ``strict=True`` of ``from_bytes``); a leaf may
    be a ``jax.ShapeDtypeStruct``. Extra keys are ignored for a dict and refused for a namedtuple or a class. Where
    the target has a typed PRNG key, the state's uint32 data become one of the same kind.

    Args:
        target: any pytree.
        state: what ``to_state_dict`` or ``msgpack_restore`` gave.
        name: what to call the root in error messages.

    Raises:
        MismatchError: missing or unknown keys, another number of items, or a leaf where a container belongs.

    Source: flax.serialization.from_state_dict.

    Example:
        >>> from_state_dict({"a": (0, 0)}, {"a": {"0": 1, "1": 2}})
        {'a': (1, 2)}
    """
    names = _place.names
    depth = len(names)
    root = _Restorer(iter([(name, target)]), {name: state}, list)
    levels = [root]
    try:
        while levels:
            above = levels[-1]
            states, restored, absent = above.state, above.restored, above.absent
            for part, wanted in above.children:
                if absent is not None and part not in states:
                    raise absent(part)
                found = states[part]
                if type(wanted) in LEAF_TYPES:
                    restored.append(found)
                    continue
                names.append(part)
                begun = _begin(wanted, found, above.in_class)
                if type(begun) is not _Restorer:
                    restored.append(begun)
                    names.pop()
                    continue
                if len(levels) > MAX_DEPTH + 1:
                    raise TooDeepError(f"the tree is more than {MAX_DEPTH} containers deep; it may hold itself")
                begun.in_class |= above.in_class
                levels.append(begun)
                break
            else:
                levels.pop()
                if levels:
                    levels[-1].restored.append(above.rebuild(restored))
                    names.pop()
        return root.restored[0]
    finally:
        del names[depth:]


def _begin(target: Any, state: Any, in_class: bool) -> Any:
    """Return the finished value, or what restores a container child by child."""
    kind = type(target)
    if (entry := REGISTRY.get(kind)) is not None:
        return entry[1](target, state)
    if (built_in := _RESTORERS.get(kind)) is not None:
        return built_in(target, state)
    if is_namedtuple(target):
        return _restore_namedtuple(target, state)
    if is_typed_key(target):
        return _restore_key(target, state)
    node = None if registry.flax_overrides(kind) else open_pytree_node(target)
    if node is not None:
        return _restore_node(target, node, state)
    if registry.flax_serves(kind):
        return registry.restore_with_flax(target, state, _place.names[-1])
    return target if in_class and state is None and is_code(target) else state


def _restore_partial(partial: Any, state: Any) -> _Restorer:
    _require_dict(NotItemsError, "Partial", state)
    fields = iter([("args", partial.args), ("keywords", partial.keywords)])
    return _Restorer(fields, state, lambda found: type(partial)(partial.func, *found[0], **found[1]), _no_item)


def _restore_namedtuple(xs: Any, state: Any) -> _Restorer:
    names = xs._fields
    _require_dict(NotADictError, "namedtuple", state)
    if (state := registry.modernize_namedtuple(state, names)) is None:
        raise _error(AbsentItemError, "the old form of a namedtuple is incomplete")
    if set(state) != set(names):
        found, wanted = _set_text(state), _set_text(set(names))
        text = f"The field names of the state dict and the named tuple do not match, got {found} and {wanted}"
        raise _error(StructureMismatchError, text)
    fields = ((name, getattr(xs, name)) for name in names)
    return _Restorer(fields, state, lambda found: type(xs)(**dict(zip(names, found, strict=True))))


def _restore_dict(xs: dict[Any, Any], state: Any) -> _Restorer | dict[Any, Any]:
    if not isinstance(state, dict):
        _require_dict(NotADictError, "dict", state)
    try:
        restored = {key: state[str(key)] for key in xs}
    except KeyError:
        _check_keys(map(str, xs), state)
        raise
    inner = [(key, value) for key, value in xs.items() if type(value) not in LEAF_TYPES]
    if not inner:
        return restored
    children = ((str(key), value) for key, value in inner)
    return _Restorer(children, state, lambda found: restored | dict(zip(dict(inner), found, strict=True)))


def _restore_list(xs: list[Any] | tuple[Any, ...], state: Any) -> _Restorer:
    _check_length(len(xs), state)
    return _Restorer(((str(index), value) for index, value in enumerate(xs)), state, type(xs), _no_item)


def _restore_node(target: Any, node: Node, state: Any) -> _Restorer:
    """Restore what jax opened."""
    children, name = node.children, type(target).__name__
    if node.kind == "mapping":
        _check_keys(children, state)
        return _Restorer(iter(children.items()), state, node.rebuild)
    if node.kind == "items":
        _check_length(len(children), state)
        return _Restorer(iter(children.items()), state, node.rebuild, _no_item, in_class=True)
    _require_dict(NotADictError, name, state)

    def no_field(part: str) -> StructureMismatchError:
        text = f"Missing field {part} in state dict while restoring an instance of {name},"
        return _error(StructureMismatchError, text)

    def rebuild(found: list[Any]) -> Any:
        if unknown := [str(part) for part in state if part not in children]:
            text = f'Unknown field(s) "{",".join(unknown)[:_LONGEST_NAMES]}" in state dict'
            raise _error(StructureMismatchError, f"{text} while restoring an instance of {name}")
        return node.rebuild(found)

    return _Restorer(iter(children.items()), state, rebuild, no_field, in_class=True)


def _check_keys(wanted: Iterable[str], state: Any) -> None:
    if not isinstance(state, dict):
        _require_dict(NotADictError, "dict", state)
    if absent := [key for key in wanted if key not in state]:
        text = f"target dict contains keys {_set_text(absent)} which are not present in state dict"
        raise _error(StructureMismatchError, f"The target dict keys and state dict keys do not match, {text}")


def _check_length(length: int, state: Any) -> None:
    # As in flax, whatever has a length of 0 is the state of no items.
    is_array = registry.has_shape_and_dtype(state)
    if length == 0 and (state.shape[:1] == (0,) if is_array else state in (b"", "", [], ())):
        return
    _require_dict(NotItemsError, f"list of {pluralize(length, 'items')}", state)
    if len(state) != length:
        text = f"The size of the list and the state dict do not match, got {length} and {len(state)}"
        raise _error(StructureMismatchError, text)


def _require_dict(kind: type[StructureMismatchError], what: str, state: Any) -> None:
    if not isinstance(state, dict):
        raise _error(kind, f"the target is a {what}, the state a {_describe_state(state)},")


def _no_item(part: str) -> StructureMismatchError:
    return _error(AbsentItemError, f"the state has no item {part!r}")


def _error(kind: type[StructureMismatchError], text: str) -> StructureMismatchError:
    return kind(f"{text} at path {current_path()}", path=tuple(_place.names[1:]))


def _restore_key(target: Any, state: Any) -> Any:
    """Make typed PRNG keys of uint32 data, of the kind that the target has."""
    if is_typed_key(state):
        return state
    kind = str(target.dtype).removeprefix("key<").removesuffix(">")
    try:
        with jax.transfer_guard_host_to_device("allow"):
            keys = jax.random.wrap_key_data(jax.numpy.asarray(state), impl=registry.key_impl(target))
        if keys.dtype == target.dtype:
            return keys
        cause: Exception = ValueError("jax knows another implementation by its name")
    except (TypeError, ValueError) as error:
        cause = error
    text = f"the target is a PRNG key ({kind}), the state {_describe_state(state)} cannot be its data ({cause}),"
    raise _error(NotItemsError, text) from cause


def _describe_state(state: Any) -> str:
    return f"{type(state).__name__} ({state!r:.40})" if type(state) in LEAF_TYPES else type(state).__name__


def _set_text(names: Any) -> str:
    """Print names as flax prints a set, but always in the same order."""
    return "{" + shorten(", ".join(sorted(map(repr, names))), _LONGEST_NAMES) + "}"


_RESTORERS: Final[dict[type, Callable[[Any, Any], Any]]] = {
    dict: _restore_dict,
    list: _restore_list,
    tuple: _restore_list,
    jax.tree_util.Partial: _restore_partial,
}
