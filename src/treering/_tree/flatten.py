"""Pytree -> the structure, key texts and leaves that a checkpoint holds, and the kind of each leaf.

One walk, which keeps its own stack, finds all of them. Some objects cannot be saved; the errors say what to do instead.
"""

from __future__ import annotations

import array
import collections
import contextlib
import copy
import dataclasses
import datetime
import decimal
import fractions
import functools
import pathlib
import re
import types
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import jax
import numpy as np

from treering._format.index import MAX_LEVELS, Container, OpaqueLeaf, Token
from treering._format.selection import select, thinned_as_dicts
from treering._format.structure import KEYS, StandIn, class_name, key_text
from treering._printable import kind_of, list_lines, way_to_save
from treering._tree.registry import (
    LEAF_TYPES,
    REGISTRY,
    Node,
    flax_serves,
    has_shape_and_dtype,
    is_code,
    is_namedtuple,
    is_typed_key,
    key_dtype,
    open_pytree_node,
)
from treering._tree.state_dict import from_state_dict, shown_key, to_state_dict
from treering._tree.static_values import SETTINGS, key_value, opaque_of, static_value
from treering._values.dtypes import check_writable
from treering._values.human import pluralize
from treering._values.keys import escape_part, split_key
from treering.errors import UnsupportedError

_STATE_KEY: Final = "state"
Rebuild = Callable[[list[Any]], Any]
"""Makes a node of the same class and static fields from other children, in the same order."""
_Aux: TypeAlias = tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flattened:
    """A tree as a checkpoint sees it."""

    tokens: list[Token] = dataclasses.field(default_factory=list)
    """The containers in pre-order, and between them how many leaves come next."""
    keys: list[str] = dataclasses.field(default_factory=list)
    """Key text of each leaf."""
    leaves: list[Any] = dataclasses.field(default_factory=list)
    """The leaves themselves."""
    kinds: list[str] = dataclasses.field(default_factory=list)
    """Kind of each leaf: one of ``ARRAY_KINDS`` or ``PYTHON_KINDS``; in a target also "abstract"."""
    opaque: dict[int, OpaqueLeaf] = dataclasses.field(default_factory=dict)
    """Leaf number -> what stands in a file for an opaque leaf."""
    structured: bool = True
    """Whether the containers are those of the tree itself."""
    part: tuple[str, ...] = ()
    """The globs that kept the leaves, where others were left out."""


REFUSED: Final = "refused"
"""The kind of a leaf that cannot be saved, in a tree of which a part is wanted."""


def flatten(tree: Any) -> Flattened:
    """Return what a checkpoint holds of ``tree``. No array is touched.

    None is a leaf. Containers are dict (its order and the types of its keys are kept), list, tuple, namedtuple, and
    as "other" nodes every further class that jax knows as a pytree node, what only a state-dict handler knows, and
    dataclasses that nobody registered. A class stands there by its name with its static fields: those of a
    dataclass that are no children, the function of a ``Partial``, the factory of a ``defaultdict``, else as "aux"
    what the class told jax. The children of an OrderedDict, FrozenDict or other mapping are its fields; where a key
    is no str, its fields are their texts and a static "keys" has the keys themselves. Static fields and keys that a
    file cannot hold are ``ForeignKey``: class and text.

    Functions, dtypes, enums, meshes and shardings, which a ``like`` gives again, are "opaque" leaves.

    Raises:
        UnsupportedError: one or more leaves that could not be given back; all of them are named, with what to do.
            Dict keys that are alike as text. More than 1,024 levels.

    Example:
        >>> flat = flatten({"w": [1.5, None], "f": abs})
        >>> flat.keys, flat.kinds
        (['w/0', 'w/1', 'f'], ['float', 'none', 'opaque'])
        >>> [token if isinstance(token, int) else (token.node, token.keys) for token in flat.tokens]
        [('dict', ('w', 'f')), ('list', (0, 1)), 3]
    """
    return _FlattenWalk(kind_to_save).over(tree)


def flatten_part(tree: Any, only: Sequence[str]) -> tuple[Flattened, Flattened, list[int]]:
    """Return what `flatten` does, the part of it that globs keep, and the numbers of the leaves of that.

    A leaf that cannot be saved is of the kind ``REFUSED`` where no glob keeps it. Containers of the part that lost
    children are dicts.

    Raises:
        UnsupportedError: as `flatten` says, of the leaves that are kept.
        MismatchError: nothing matches a glob.

    Example:
        >>> flat, part, numbers = flatten_part({"w": [1.5, 2.5], "tags": {"a"}}, ["w/1"])
        >>> flat.kinds, part.keys, part.leaves, numbers
        (['float', 'float', 'refused'], ['w/1'], [2.5], [1])
    """
    walked = _FlattenWalk(kind_to_save, keeps_refused=True)
    flat = walked.over(tree)
    kept = select(flat.tokens, flat.keys, at=None, only=only, saves="only")
    numbers = list(kept.leaves)
    walked.raise_refused({flat.keys[number] for number in numbers if flat.kinds[number] == REFUSED})
    part = Flattened(
        tokens=thinned_as_dicts(kept.structure),
        keys=list(kept.keys),
        leaves=[flat.leaves[number] for number in numbers],
        kinds=[flat.kinds[number] for number in numbers],
        opaque={new: flat.opaque[old] for new, old in enumerate(numbers) if old in flat.opaque},
        part=tuple(only) if len(numbers) < len(flat.keys) else (),
    )
    return flat, part, numbers


def flatten_like(like: Any) -> Flattened:
    """Return a target in the same form: nothing is refused as a leaf, and abstract arrays are of kind "abstract".

    Raises:
        UnsupportedError: dict keys that are alike as text, or more than 1,024 levels.

    Example:
        >>> import jax
        >>> flatten_like({"w": jax.ShapeDtypeStruct((2,), "float32")}).kinds
        ['abstract']
    """
    flat = _FlattenWalk(kind_in_target, kinds=KINDS | {jax.ShapeDtypeStruct: "abstract"}).over(like)
    # What `treering.abstract` gives for a text in a data file stands for a text; names of classes have a point.
    for number in [n for n, leaf in flat.opaque.items() if leaf.class_name in ("str", "bytes", "bytearray")]:
        flat.kinds[number] = flat.opaque.pop(number).class_name
    return flat


@dataclasses.dataclass(slots=True)
class _FlattenWalk:
    """A walk over one tree, and what it found so far."""

    kind_of: KindOf
    kinds: Mapping[type, str] = dataclasses.field(default_factory=lambda: KINDS)
    """Types whose instances are leaves of one kind."""
    flat: Flattened = dataclasses.field(default_factory=Flattened)
    refused: list[tuple[str, UnsupportedError]] = dataclasses.field(default_factory=list)
    counted: int = 0
    keeps_refused: bool = False
    """Whether what is refused is a leaf, and the caller raises."""

    def over(self, tree: Any) -> Flattened:
        """Walk over all of it."""
        keys, leaves, kinds, known = self.flat.keys, self.flat.leaves, self.flat.kinds, self.kinds
        top = self._begin("", tree)
        # A level: its children still to come, and the key text in front of theirs.
        levels: list[tuple[Iterator[tuple[str, Any]], str]] = [] if top is None else [(self._children(top, ""), "")]
        while levels:
            children, prefix = levels[-1]
            for part, child in children:
                if "/" in part or "~" in part:
                    part = escape_part(part)  # noqa: PLW2901
                key = prefix + part or "~"  # the one empty part, as join_key writes it
                kind = known.get(type(child))
                if kind is not None and (kind != "numpy" or child.dtype in WRITABLE):
                    keys.append(key)
                    leaves.append(child)
                    kinds.append(kind)
                    continue
                if (inner := self._begin(key, child)) is not None:
                    if len(levels) == MAX_LEVELS:
                        deep = f"the tree is more than {MAX_LEVELS} containers deep"
                        raise UnsupportedError(deep, path=split_key(key), hint="it may hold itself")
                    levels.append((self._children(inner, f"{prefix}{part}/"), f"{prefix}{part}/"))
                    break
            else:
                levels.pop()
        self._count_leaves()
        if not self.keeps_refused:
            self.raise_refused({key for key, _ in self.refused})
        opaque = ((number, opaque_of(leaves[number])) for number, kind in enumerate(kinds) if kind == "opaque")
        self.flat.opaque.update(opaque)
        return self.flat

    def _children(self, node: OpenNode, prefix: str) -> Iterator[tuple[str, Any]]:
        """Return the children of a node that are still to be looked at, with the texts of their keys.

        Where all of them are leaves of known kinds and no key needs escaping, all are noted down at once.
        """
        keys, children = node.container.keys, node.children
        parts = keys if set(map(type, keys)) <= {str} else list(map(key_text, keys))
        kinds = [kind for kind in map(self.kinds.get, map(type, children)) if kind is not None]
        text = "".join(parts)
        known = len(kinds) == len(children) == len(parts) and "/" not in text and "~" not in text and "" not in parts
        if known and "numpy" in kinds:
            known = {x.dtype for x, kind in zip(children, kinds, strict=True) if kind == "numpy"} <= WRITABLE
        if not known:
            return zip(parts, children, strict=True)
        self.flat.keys.extend(map(prefix.__add__, parts))
        self.flat.leaves.extend(children)
        self.flat.kinds.extend(kinds)
        return iter(())

    def _begin(self, key: str, x: Any) -> OpenNode | None:
        """Note ``x`` down; return a node, whose children are still to be looked at, and None for a leaf."""
        kind = self.kinds.get(type(x))
        try:
            node = open_node(x) if kind is None else None
            if node is not None:
                self._count_leaves()
                self.flat.tokens.append(node.container)
                return node
            if kind is None or kind == "numpy":
                kind = self.kind_of(x)
        except UnsupportedError as error:
            self.refused.append((key, error))
            if not self.keeps_refused:
                return None
            kind = REFUSED
        self.flat.keys.append(key)
        self.flat.leaves.append(x)
        self.flat.kinds.append(kind)
        return None

    def _count_leaves(self) -> None:
        """Note how many leaves came since the last container."""
        if count := len(self.flat.keys) - self.counted:
            self.flat.tokens.append(count)
            self.counted = len(self.flat.keys)

    def raise_refused(self, keys: Collection[str]) -> None:
        """Raise why the leaves of these keys cannot be saved, if there are any."""
        refused = [(key, error) for key, error in self.refused if key in keys]
        if len(refused) == 1:
            ((key, error),) = refused
            raise UnsupportedError(error.message, path=split_key(key), hint=error.hint) from error
        if refused:
            lines = [f"{shown_key(key)}: {error}" for key, error in refused]
            raise UnsupportedError(f"{pluralize(len(lines), 'leaves')} cannot be saved:{list_lines(lines)}")


@dataclasses.dataclass(slots=True)
class OpenNode:
    """A node opened by one level."""

    container: Container
    """What a file says of it."""
    children: Sequence[Any]
    """Its children, in the order of the container's keys."""
    rebuild: Rebuild
    """Makes another one of other children."""


def open_node(x: Any) -> OpenNode | None:
    """Open ``x`` by one level; None for a leaf.

    dict, list, tuple and namedtuple are opened here, everything else that jax knows as a pytree node by jax. Below
    them come types that have only a state-dict handler, here or in a loaded flax, and last dataclasses that nobody
    registered, by their fields.

    Raises:
        UnsupportedError: keys that are alike as text, or a node that jax cannot open.
    """
    kind = type(x)
    if kind is jax.ShapeDtypeStruct:
        return None
    if kind is dict:
        own = tuple(x)
        short = len(own) <= _SHORT and set(map(type, own)) <= {str}
        head = _head_of_dict(own) if short else Container(node="dict", keys=_keys(own))
        return OpenNode(head, list(x.values()), lambda children: dict(zip(own, children, strict=True)))
    if kind is list or kind is tuple:
        make = _head_of_sequence if len(x) <= _SHORT else _head_of_sequence.__wrapped__
        return OpenNode(make(kind.__name__, len(x)), x, kind)
    if kind is StandIn:
        return _other(x.class_name, x.fields, x.static, functools.partial(_close_stand_in, _open_stand_in(x)[1]))
    if is_namedtuple(x):
        head = Container(node="namedtuple", keys=tuple(x._fields), class_name=class_name(kind))
        return OpenNode(head, tuple(x), kind._make)
    if kind is jax.tree_util.Partial:
        fields = {"args": x.args, "keywords": x.keywords}
        return _other(class_name(kind), fields, {"func": x.func}, lambda found: kind(x.func, *found[0], **found[1]))
    # jax would warn that an iterator is a leaf.
    if kind in LEAF_TYPES or (isinstance(x, Iterator) and kind.__module__ == "builtins"):
        return None
    if (node := open_pytree_node(x)) is not None:
        return _open_jax_node(x, node)
    if kind in REGISTRY or flax_serves(kind):
        return _open_handled(x)
    return _open_dataclass(x) if dataclasses.is_dataclass(x) and not isinstance(x, type) else None


_SHORT: Final = 64
"""Layers have the same few keys: one container stands for all that have no more of them."""


@functools.lru_cache(256)
def _head_of_dict(keys: tuple[str, ...]) -> Container:
    return Container(node="dict", keys=keys)


@functools.lru_cache(256)
def _head_of_sequence(node: str, length: int) -> Container:
    return Container(node=node, keys=tuple(range(length)))


def _keys(keys: Iterable[Any]) -> tuple[Any, ...]:
    """Return dict keys as a file holds them.

    Raises:
        UnsupportedError: two are alike as text, or one has no text.
    """
    found = tuple(keys)
    if set(map(type, found)) <= {str}:
        return found
    held: dict[str, tuple[Any, Any]] = {}
    for key in found:
        try:
            value = key_value(key)
            text = key_text(value)
        except (ValueError, RecursionError) as error:  # an int of more digits than Python prints, endless tuples
            if isinstance(error, UnsupportedError):
                raise
            raise UnsupportedError(f"a dict key has no text: {error}") from error
        if text in held:
            alike = f"the dict keys {held[text][0]!r:.200} and {key!r:.200} have the same text"
            raise UnsupportedError(alike, hint="rename one of them")
        held[text] = key, value
    return tuple(value for _, value in held.values())


def _other(name: str, fields: Mapping[Any, Any], static: Mapping[str, Any], rebuild: Rebuild) -> OpenNode:
    """Return a node of a class; keys that are no str are a static of their own, its fields are their texts."""
    keys = _keys(fields)
    statics = {name: static_value(value) for name, value in static.items()}
    if any(type(key) is not str for key in keys):
        statics[KEYS] = keys
    head = Container(node="other", keys=tuple(map(key_text, keys)), class_name=name, static=tuple(statics.items()))
    return OpenNode(head, list(fields.values()), rebuild)


def _open_jax_node(x: Any, node: Node) -> OpenNode:
    fields: Mapping[Any, Any] = node.children
    known = _field_values(x) if dataclasses.is_dataclass(x) else None
    if known is not None and node.children.keys() <= known.keys():
        static = {name: value for name, value in known.items() if name not in node.children}
    elif isinstance(x, Mapping):
        own = list(x)
        if list(map(str, own)) == list(node.children):
            fields = dict(zip(own, node.children.values(), strict=True))
        static = {"default_factory": x.default_factory} if type(x) is collections.defaultdict else {}
    else:
        static = {} if node.aux is None else {"aux": node.aux}
    return _other(class_name(type(x)), fields, static, node.rebuild)


def _field_values(x: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that are set."""
    return {field.name: getattr(x, field.name) for field in dataclasses.fields(x) if hasattr(x, field.name)}


def _open_handled(x: Any) -> OpenNode:
    """Open what only a state-dict handler knows: its state dict, or the one thing that the handler returns."""
    state = to_state_dict(x)
    whole = not isinstance(state, dict)
    fields = {_STATE_KEY: state} if whole else state

    def rebuild(children: list[Any]) -> Any:
        return from_state_dict(x, children[0] if whole else dict(zip(fields, children, strict=True)))

    return _other(class_name(type(x)), fields, {}, rebuild)


def _open_dataclass(x: Any) -> OpenNode | None:
    """Open a dataclass that nobody registered; None where its fields are not what its instances store.

    Raises:
        UnsupportedError: an array lies in an attribute that is no field; ``like`` would give an old one back.
    """
    fields = _field_values(x)
    if any(isinstance(getattr(type(x), name, None), property) for name in fields):
        return None
    if (place := hidden_array(x, fields)) is not None:
        text = f"a {class_name(type(x))} holds an array in {place!r}, which is not a field of it"
        raise UnsupportedError(text, hint="make it a field, or register the class as a pytree node")

    def rebuild(children: list[Any]) -> Any:
        result = copy.copy(x)
        for name, child in zip(fields, children, strict=True):
            object.__setattr__(result, name, child)
        return result

    return _other(class_name(type(x)), fields, {}, rebuild)


def _open_stand_in(node: StandIn) -> tuple[list[tuple[Any, Any]], _Aux]:
    children = [(jax.tree_util.DictKey(key), child) for key, child in node.fields.items()]
    return children, (node.class_name, tuple(node.fields), tuple(node.static.items()))


def _close_stand_in(aux: _Aux, children: Iterable[Any]) -> StandIn:
    class_name, keys, static = aux
    return StandIn(class_name, dict(zip(keys, children, strict=True)), dict(static))


jax.tree_util.register_pytree_with_keys(StandIn, _open_stand_in, _close_stand_in)


_PLAIN: Final = (str, int, float, complex, bytes, bytearray)
KINDS: Final[dict[type, str]] = {kind: kind.__name__ for kind in (bool, *_PLAIN)}
"""Types whose instances are leaves of one kind. Grows by jax's array types as they are met."""
KINDS.update({type(None): "none", np.ndarray: "numpy", OpaqueLeaf: "opaque"})

WRITABLE: Final[set[np.dtype[Any]]] = set()
"""Dtypes of numpy arrays that were met and that a file can hold."""


KindOf = Callable[[Any], str]
"""Returns the kind of a leaf, or raises ``UnsupportedError``."""

_REGISTER: Final = (
    "register its class with jax.tree_util.register_dataclass or register_pytree_node, "
    "or with treering.serialization.register_serialization_state"
)
_LEAVE_OUT: Final = f"omit it, or put its content into the tree; for your own class, {_REGISTER}"
_STATE: Final = (
    "treering.Run saves its state where only dicts lead to it, as {'loaders': {'train': iterator}}, and treering.save "
    "that of a treering.each there; elsewhere put get_state() in its place"
)
_PARTIAL: Final = "pass them as arguments: a jax.tree_util.Partial(function, arrays) holds them visibly"
_MOST_SEEN: Final = 1000

# Code that may hold arrays: what a function closes over, whose method it is, what is bound to it.
_OPEN_CODE: Final = (types.FunctionType, types.MethodType, functools.partial)

_HINTS: Final[tuple[tuple[tuple[type, ...], str], ...]] = (
    ((set, frozenset), "it has no order to save its items in: make it a sorted list"),
    ((collections.deque, list, tuple), "make it a list or a tuple"),
    ((memoryview,), "make it bytes or an array"),
    ((array.array,), "make it a numpy array"),
    ((Mapping,), "make it a dict"),
    (_PLAIN, "make it the plain Python type that it is derived from"),
    ((datetime.date, datetime.time), "save x.isoformat(), and read it with fromisoformat()"),
    ((datetime.timedelta,), "save x.total_seconds()"),
    ((pathlib.PurePath, decimal.Decimal, fractions.Fraction, uuid.UUID, datetime.tzinfo), "save str(x)"),
    ((range,), "save list(x)"),
    ((slice,), "save [x.start, x.stop, x.step]"),
    ((re.Pattern,), "save x.pattern"),
)


def kind_to_save(x: Any) -> str:
    """Return the kind of a leaf that is to be saved.

    Raises:
        UnsupportedError: it could not be given back as it is, not even with the help of ``like``.

    Example:
        >>> kind_to_save(np.float32(1)), kind_to_save(abs)
        ('numpy scalar', 'opaque')
        >>> kind_to_save({1, 2})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        treering.errors.UnsupportedError: a set cannot be saved; it has no order to save its items in: ...
    """
    if isinstance(x, np.generic | np.ndarray):
        return _numpy_kind(x)
    if isinstance(x, jax.core.Tracer):
        raise UnsupportedError("a traced value has no bytes yet", hint="save outside of jit, grad and vmap")
    if isinstance(x, jax.Array):
        if (kind := _jax_kind(x)) == "key" and not _is_named(jax.random.key_impl(x), x.dtype):
            what = f"keys of the dtype {x.dtype} cannot be given back: jax does not know the implementation by its name"
            raise UnsupportedError(what, hint="save jax.random.key_data(x), and make keys of it with wrap_key_data")
        return kind
    if isinstance(x, jax.ShapeDtypeStruct):
        raise UnsupportedError("a jax.ShapeDtypeStruct holds no data", hint="save the array itself")
    if isinstance(x, SETTINGS):
        return "opaque"
    for kinds, hint in _HINTS:
        if isinstance(x, kinds):
            raise UnsupportedError(f"{kind_of(x)} cannot be saved", hint=hint)
    _check_opaque(x)
    return "opaque"


def kind_in_target(x: Any) -> str:
    """Return the kind of a leaf of ``like``: "abstract" for what has shape and dtype only, "opaque" for the rest.

    Example:
        >>> kind_in_target(jax.ShapeDtypeStruct((2,), np.float32)), kind_in_target({1, 2})
        ('abstract', 'opaque')
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        return "abstract"
    if isinstance(x, jax.Array):
        return _jax_kind(x)
    return "numpy scalar" if isinstance(x, np.generic) else "numpy" if isinstance(x, np.ndarray) else "opaque"


def _jax_kind(x: jax.Array) -> str:
    kind = "key" if is_typed_key(x) else "jax"
    if kind == "jax" and not isinstance(x, jax.core.Tracer):
        KINDS[type(x)] = kind
    return kind


def _is_named(impl: Any, dtype: Any) -> bool:
    """Tell whether the name of an implementation leads to it; one that is not registered may have that of another."""
    return isinstance(impl, str) and key_dtype(impl) == dtype


def _numpy_kind(x: Any) -> str:
    check_writable(x.dtype)
    if isinstance(x, np.generic):
        return "numpy scalar"
    if type(x) not in (np.ndarray, np.memmap):
        text = f"a {class_name(type(x))} holds more than its numbers and would come back as a plain array"
        raise UnsupportedError(text, hint="save np.asarray(x), and the rest beside it")
    WRITABLE.add(x.dtype)
    return "numpy"


def _check_opaque(x: Any) -> None:
    """Refuse an object that is more than code: its state would be lost.

    Raises:
        UnsupportedError: it holds arrays, or it is nothing that can be called.
    """
    kind = class_name(type(x))
    if isinstance(x, type):
        return
    if _is_array(x):
        raise UnsupportedError(f"a {kind} is not an array of numpy or jax", hint="save np.asarray(x)")
    if hasattr(x, "get_state") and hasattr(x, "set_state"):
        raise UnsupportedError(f"a {kind} keeps its state to itself", hint=_STATE)
    # jit and the like are C, and hold the function that they were made of.
    if (place := hidden_array(getattr(x, "__wrapped__", None) if _is_closed(x) else x)) is not None:
        hint = _PARTIAL if isinstance(x, _OPEN_CODE) else way_to_save(x, _REGISTER)
        raise UnsupportedError(f"a {kind} holds arrays where jax cannot see them, in {place!r}", hint=hint)
    # The dtype of typed PRNG keys is no numpy dtype.
    if is_code(x) or callable(x) or isinstance(x, type(jax.eval_shape(jax.random.key, 0).dtype)) or _is_placeholder(x):
        return
    article = "an" if kind[:1].lower() in "aeio" else "a"
    what = f"{article} {kind} is not an array, number or text, and a file cannot hold it"
    raise UnsupportedError(what, hint=way_to_save(x, _LEAVE_OUT))


class _Placeholder:
    """As large as an instance of any class of Python's without slots; one written in C may hide something."""


def _is_placeholder(x: Any) -> bool:
    """Tell whether an object has no state, so that the class says all: equinox puts such ones where leaves are shared.

    Example:
        >>> _is_placeholder(object())
        False
    """
    cls = type(x)
    is_plain = cls.__mro__ == (cls, object) and cls.__basicsize__ == _Placeholder.__basicsize__
    return is_plain and getattr(x, "__dict__", None) == {}


def hidden_array(x: Any, fields: Collection[str] = ()) -> str | None:
    """Return the first attribute in or below ``x`` that holds an array, None where there is none.

    Args:
        x: any object.
        fields: attributes of ``x`` itself that do not count.
    """
    pending = [(name, value) for name, value in _attributes(x).items() if name not in fields]
    seen = {id(x): x}  # the objects themselves too, so that no id is given anew
    while pending and len(seen) < _MOST_SEEN:
        place, value = pending.pop()
        for leaf in _leaves(value):
            if _is_array(leaf):
                return place
            if not (type(leaf) in KINDS or _is_closed(leaf) or isinstance(leaf, SETTINGS) or id(leaf) in seen):
                seen[id(leaf)] = leaf
                pending += [(f"{place}.{name}", inner) for name, inner in _attributes(leaf).items()]
    return None


def _is_array(x: Any) -> bool:
    return not isinstance(x, type) and (has_shape_and_dtype(x) or hasattr(x, "__array__"))


def _is_closed(x: Any) -> bool:
    """Tell whether ``x`` is code that nothing is known to lie in: all but Python's own functions and their kin."""
    return is_code(x) and not isinstance(x, _OPEN_CODE)


def _attributes(x: Any) -> dict[str, Any]:
    """Return what lies in the object's own dict and slots; of a function also its closure and defaults (``name=``)."""
    if isinstance(x, types.ModuleType | type):
        return {}
    if isinstance(x, types.FunctionType):
        return _closure(x) | _defaults(x) | {f".{name}": value for name, value in vars(x).items()}
    if isinstance(x, types.MethodType):
        return {"__self__": x.__self__, "__func__": x.__func__}
    if isinstance(x, functools.partial):
        return {"args": x.args, "keywords": x.keywords, "func": x.func}
    found = dict(getattr(x, "__dict__", {}))
    for cls in type(x).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(x, name):
                found[name] = getattr(x, name)
    return found


def _closure(function: types.FunctionType) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # nothing was assigned to it yet
            found[name] = cell.cell_contents
    return found


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    values = function.__defaults__ or ()
    code = function.__code__
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    found = dict(zip(names, values, strict=True)) | (function.__kwdefaults__ or {})
    return {f"{name}=": value for name, value in found.items()}


def _leaves(value: Any) -> list[Any]:
    try:
        return jax.tree.leaves(value, is_leaf=lambda inner: isinstance(inner, Iterator))  # jax would warn of those
    except (TypeError, ValueError, RecursionError):  # dict keys that jax cannot sort, or more levels than it takes
        return [value]
