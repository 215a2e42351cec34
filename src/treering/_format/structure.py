"""The containers of a checkpoint without the program that made them: key texts, and a tree of what Python knows.

A dict comes back as a dict with its own keys, a list as a list, a tuple as a tuple, an ``OrderedDict`` as one; a
namedtuple as a namedtuple of the same name and fields, made on the fly; every other class as a ``StandIn``, unless
``register_node`` said what to make of it. No class is ever imported because a file names it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import keyword
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar

from treering._format.index import MAX_LEVELS, Container, ForeignKey, Token, holds_text
from treering._printable import printable
from treering._values.human import pluralize
from treering._values.keys import escape_part, join_key
from treering.errors import FormatError, UnsupportedError

T = TypeVar("T")
Nested: TypeAlias = "dict[str, int | Nested]"
"""Numbers of leaves in nested dicts, below a root of one key, so that a leaf may be the whole tree."""


def nest_paths(
    paths: Iterable[tuple[str, ...]], clash: Callable[[int, int], Exception] | None = None
) -> tuple[list[Token], list[int]]:
    """Return dicts around leaves at these paths, and the numbers of the paths in the order of the tree.

    Args:
        paths: the paths.
        clash: makes the error for a path and the one that it is equal to or lies inside of, by their numbers; of one
            around which others lie, both are its own.

    Raises:
        FormatError: a path is there twice, or inside another one, or has more than 1,024 parts.

    Example:
        >>> structure, order = nest_paths([("a", "w"), ("b",), ("a", "b")])
        >>> [token.keys if isinstance(token, Container) else token for token in structure], order
        ([('a', 'b'), ('w', 'b'), 3], [0, 2, 1])
    """
    root: Nested = {}
    for number, path in enumerate(paths):
        if len(path) >= MAX_LEVELS:
            raise FormatError(f"{join_key(path)!r:.200} is more than {MAX_LEVELS} containers deep")
        node = root
        *above, last = ("", *path)
        for part in above:
            inner = node.setdefault(part, {})
            if isinstance(inner, int):
                raise (
                    clash(number, inner) if clash else FormatError(f"{join_key(path)!r:.200} lies inside another leaf")
                )
            node = inner
        if (there := node.setdefault(last, number)) != number:
            if clash is not None:
                raise clash(number, there if isinstance(there, int) else number)
            raise FormatError(f"there are two leaves at {join_key(path)!r:.200}, or others inside it")
    return flatten_nodes((root or {"": {}}).values(), _open_nested)


def _open_nested(child: int | Nested) -> tuple[Container, Iterable[int | Nested]] | None:
    return None if isinstance(child, int) else (Container(node="dict", keys=tuple(child)), child.values())


def flatten_nodes(
    roots: Iterable[T], open_node: Callable[[T], tuple[Container, Iterable[T]] | None]
) -> tuple[list[Token], list[Any]]:
    """Return the containers in pre-order, with the numbers of leaves between them, and the leaves.

    Args:
        roots: nodes and leaves, none of which is None.
        open_node: returns the head of a node and what is in it; None for a leaf.

    Example:
        >>> flatten_nodes([0], lambda child: None)
        ([1], [0])
    """
    structure: list[Token] = []
    leaves: list[Any] = []
    run = 0
    levels: list[Iterator[T]] = [iter(roots)]
    while levels:
        if (child := next(levels[-1], None)) is None:
            levels.pop()
        elif (node := open_node(child)) is None:
            leaves.append(child)
            run += 1
        else:
            structure += [run, node[0]] if run else [node[0]]
            run = 0
            levels.append(iter(node[1]))
    return [*structure, run] if run else structure, leaves


KEYS: Final = "keys"
"""Name of the static that holds the keys of a mapping's children where some are no str; its fields are their texts."""

ORDERED_DICT: Final = "collections.OrderedDict"
"""The one class of other nodes that is made without being registered: it is Python's own."""

_MOST_NAMEDTUPLES: Final = 4096
_WITHOUT_CLASS: Final = "call register_node with make=, or load with like="

Make = Callable[[dict[Any, Any], dict[str, Any]], Any]
"""Makes an instance of its children by name and its static fields by name."""


_MAKERS: Final[dict[str, tuple[type, Make]]] = {}


# ------------------------------------------------------------------------------------------------------------ stand-ins


class StandIn(Mapping[Any, Any]):
    """A node whose class this program has not been told about: its children by name, and its static fields.

    It is a mapping of its children. They and the static fields are attributes too, unless their name begins with an
    underscore or is one that a mapping or a stand-in has itself, such as ``values``. jax sees a stand-in as a pytree
    node, and saving it again writes the original class. ``register_node`` and ``like=`` give the real class.

    Args:
        class_name: module and qualified name of the class.
        fields: the children by name, in order.
        static: what the class has beside its children, as far as a file can hold it.

    Example:
        >>> state = StandIn("shop.Adam", {"mu": [1, 2], "nu": None}, {"rate": 0.1})
        >>> state
        StandIn('shop.Adam', mu=[1, 2], nu=None; rate=0.1)
        >>> state.mu, state["nu"], list(state), state.static
        ([1, 2], None, ['mu', 'nu'], {'rate': 0.1})
    """

    __slots__ = ("class_name", "fields", "static")
    __hash__ = None  # type: ignore[assignment]  # its children may change, as a dict's may

    def __init__(self, class_name: str, fields: Mapping[Any, Any], static: Mapping[str, Any] | None = None) -> None:
        self.class_name = class_name
        self.fields = dict(fields)
        self.static = dict(static or {})

    def __getitem__(self, key: Any) -> Any:
        return self.fields[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def __getattr__(self, name: str) -> Any:
        # A file must not answer where Python and others look for protocols; slots are asked for while copying.
        if name.startswith("_") or name in StandIn.__slots__:
            raise AttributeError(name)
        for held in (self.fields, self.static):
            if name in held:
                return held[name]
        what = f"the stand-in for {printable(self.class_name)} has no field {name!r}"
        raise AttributeError(f"{what}; load with like= to get an instance of the class")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StandIn):
            return NotImplemented
        mine, others = (self.class_name, self.static, self.fields), (other.class_name, other.static, other.fields)
        return mine == others and list(self.fields) == list(other.fields)

    def __repr__(self) -> str:
        fields, static = map(_format_items, (self.fields, self.static))
        return f"StandIn({self.class_name!r}{', ' if fields else ''}{fields}{'; ' if static else ''}{static})"


def _format_items(held: Mapping[Any, Any]) -> str:
    return ", ".join(f"{printable(str(key))}={value!r}" for key, value in held.items())


# --------------------------------------------------------------------------------------------------- registered classes


def register_node(cls: type, make: Make | None = None) -> type:
    """Let ``load`` without ``like`` make instances of ``cls`` where a checkpoint names it; a decorator too.

    The class is found by its module and qualified name.

    Args:
        cls: a dataclass or namedtuple, or any class together with ``make``.
        make: ``f(fields, static)`` returns an instance; ``fields`` are the children by name, ``static`` the other
            recorded fields, with a `ForeignKey` for each object that files do not hold. Without it
            ``cls(**fields, **static)`` is called.

    Raises:
        UnsupportedError: ``cls`` is neither a dataclass nor a namedtuple, and there is no ``make``.

    Example:
        >>> import dataclasses
        >>> @register_node
        ... @dataclasses.dataclass
        ... class Moments:
        ...     first: object
        ...     second: object
        >>> head = Container(node="other", keys=("first", "second"), class_name=class_name(Moments))
        >>> build([head, 2], [1, 2])
        Moments(first=1, second=2)
    """
    given: object = cls
    if not (isinstance(given, type) and (make is None or callable(make))):
        what = f"register_node takes a class, and a function as make=, found {given!r:.100} and {make!r:.100}"
        raise UnsupportedError(what)
    if make is None:
        if not (dataclasses.is_dataclass(cls) or (issubclass(cls, tuple) and hasattr(cls, "_fields"))):
            raise UnsupportedError(
                f"{class_name(cls)} is neither a dataclass nor a namedtuple, so treering cannot construct it",
                hint="pass make=, a function of two dicts: the children by name and the static fields by name",
            )
        make = functools.partial(_make_of_fields, cls)
    _MAKERS[class_name(cls)] = (cls, make)
    return cls


def class_name(cls: type) -> str:
    """Return the module and qualified name of a class, which stand for it in a checkpoint.

    Example:
        >>> class_name(collections.OrderedDict)
        'collections.OrderedDict'
    """
    return f"{cls.__module__}.{cls.__qualname__}"


def _make_of_fields(cls: type, fields: dict[Any, Any], static: dict[str, Any]) -> Any:
    if foreign := [name for name, value in static.items() if holds_text(value)]:
        names = ", ".join(map(printable, foreign))
        raise UnsupportedError(f"the checkpoint has only the text of {names} of {class_name(cls)}", hint=_WITHOUT_CLASS)
    values = {str(name): value for name, value in (fields | static).items()}
    try:
        inspect.signature(cls).bind(**values)
    except TypeError as error:
        names = ", ".join(map(printable, values)) or "nothing"
        problem = f"{class_name(cls)} cannot be constructed from {names}: {printable(str(error))}"
        raise UnsupportedError(problem, hint=_WITHOUT_CLASS) from error
    return cls(**values)


# ------------------------------------------------------------------------------------------------------------ key texts


def node_keys(container: Container) -> tuple[Any, ...]:
    """Return the real keys of a container's children, which for some mappings lie in their static fields."""
    if container.node == "other":
        for name, keys in container.static:
            # A class may have a static field of this name; its fields are not the texts of what that holds.
            if name == KEYS and isinstance(keys, tuple) and tuple(map(key_text, keys)) == container.keys != keys:
                return keys
    return container.keys


def walk(tokens: Iterable[Token]) -> Iterator[tuple[int, int, Token]]:
    """Yield each container, and the leaves that follow each other in one container as a run.

    Yields:
        How many containers are open around it; its place in the innermost one, of a run that of its first leaf; and the
        container, or how many leaves the run has.

    Raises:
        FormatError: the tokens end early or go on too long, or there are more than 1,024 levels.

    Example:
        >>> head = Container(node="dict", keys=("a", "b"))
        >>> [(depth, place, token is head or token) for depth, place, token in walk([head, head, 3])]
        [(0, 0, True), (1, 0, True), (2, 0, 2), (1, 1, 1)]
    """
    sizes, done = [1], [0]
    for token in tokens:
        left = 1 if isinstance(token, Container) else token
        if left < 1:
            raise FormatError(f"a run of {pluralize(left, 'leaves')} stands in the structure")
        while left:
            while sizes and done[-1] == sizes[-1]:
                sizes.pop()
                done.pop()
            if not sizes:
                raise FormatError("the structure continues after its end")
            place = done[-1]
            count = min(left, sizes[-1] - place)
            done[-1] += count
            left -= count
            yield len(sizes) - 1, place, token if isinstance(token, Container) else count
        if isinstance(token, Container):
            if len(sizes) > MAX_LEVELS:
                raise FormatError(f"the structure is more than {MAX_LEVELS} containers deep")
            sizes.append(len(token.keys))
            done.append(0)
    if done != sizes:
        raise FormatError("the structure ends early")


def containers_of(tokens: Iterable[Token]) -> Iterator[tuple[tuple[str, ...], Container]]:
    """Yield the containers of a structure with their key paths."""
    levels: list[tuple[tuple[str, ...], Container]] = []
    for depth, place, token in walk(tokens):
        if isinstance(token, Container):
            del levels[depth:]
            path = (*levels[-1][0], key_text(levels[-1][1].keys[place])) if levels else ()
            levels.append((path, token))
            yield path, token


def iter_runs(tokens: Sequence[Token], longest: int | None = None) -> Iterator[tuple[str, list[str]]]:
    """Yield the key texts of the leaves in two pieces: what all leaves of a run begin with, and how each of them ends.

    A hostile structure may have key texts that fill any memory; so they are not put together here.

    Args:
        tokens: the structure.
        longest: how many characters the leaves of a run may begin with. One container that stands in itself a thousand
            times gives a text a thousand times as long as all that was read.

    Raises:
        FormatError: as `walk` says, or what the leaves of a run begin with is longer than that.

    Example:
        >>> list(iter_runs([Container(node="dict", keys=("a", 3)), 1, Container(node="list", keys=(0, 1)), 2]))
        [('', ['a']), ('3/', ['0', '1'])]
    """
    # As `walk`, in one loop: of many layers each token counts. One container stands for all that are alike.
    known: dict[int, list[str]] = {}
    around: list[tuple[list[str], int]] = []
    above: list[str] = []
    parts, place, first, length = [""], 0, 0, 0
    for token in tokens:
        left = token if type(token) is int else 1
        if left < 1:
            raise FormatError(f"a run of {pluralize(left, 'leaves')} stands in the structure")
        while left:
            while place == len(parts):
                if not around:
                    raise FormatError("the structure continues after its end")
                parts, place = around.pop()
                length -= len(above.pop())
            first, place = place, min(place + left, len(parts))
            left -= place - first
            if type(token) is int:
                if longest is not None and length > longest:
                    raise FormatError(f"the key texts of a run begin with more than {longest} characters")
                run = parts if place - first == len(parts) else parts[first:place]
                # The way to a run is put together for it alone: containers without leaves may have any number of ways.
                yield "/".join([*above[1:], ""]), [part or "~" for part in run] if len(around) == 1 else run
        if isinstance(token, Container):
            if len(around) >= MAX_LEVELS:
                raise FormatError(f"the structure is more than {MAX_LEVELS} containers deep")
            around.append((parts, place))
            above.append(parts[first])
            length += len(parts[first])
            if (inner := known.get(id(token))) is None:
                inner = known[id(token)] = _parts(token.keys)
            parts, place = inner, 0
    if place != len(parts) or any(place != len(parts) for parts, place in around):
        raise FormatError("the structure ends early")


def _parts(keys: tuple[Any, ...]) -> list[str]:
    """Return keys as parts of key texts; those of a long list, and plain names, take no call for each."""
    kinds = set(map(type, keys))
    if kinds == {int}:
        return [*map(str, keys)]
    if kinds == {str} and escape_part(joined := "".join(keys)) == joined:
        return list(keys)
    return [escape_part(key_text(key)) for key in keys]


# ---------------------------------------------------------------------------------------------------- trees of leaves


def build(tokens: Iterable[Token], leaves: Sequence[Any]) -> Any:
    """Return the tree that ``tokens`` describe around ``leaves``, as far as this program knows its classes.

    Raises:
        FormatError: tokens and leaves do not belong together, or two keys of a dict are equal.
        UnsupportedError: a registered class cannot be made of what the checkpoint has, or there are more than 4,096
            different namedtuples.

    Example:
        >>> build([Container(node="dict", keys=(1, "a")), 1, Container(node="tuple", keys=(0, 1)), 2], [7, 8, 9])
        {1: 7, 'a': (8, 9)}
    """
    return assemble(tokens, leaves, functools.partial(_node, made=set()))


def assemble(tokens: Iterable[Token], leaves: Sequence[Any], make: Callable[[Container, list[Any]], Any]) -> Any:
    """Return the tree that ``tokens`` describe around ``leaves``, of the nodes that ``make`` makes of their children.

    Raises:
        FormatError: tokens and leaves do not belong together.
    """
    taken = 0
    root: list[Any] = []
    heads: list[Container] = []
    children = [root]

    def close(depth: int) -> None:
        while len(heads) > depth:
            node = make(heads.pop(), children.pop())
            children[-1].append(node)

    for depth, _, token in walk(tokens):
        close(depth)
        if isinstance(token, Container):
            heads.append(token)
            children.append([])
            continue
        children[-1].extend(leaves[taken : taken + token])
        taken += token
        if taken > len(leaves):
            raise FormatError(f"the structure has {pluralize(taken, 'leaves')} or more, there are {len(leaves)}")
    if taken != len(leaves):
        raise FormatError(f"the structure ends after {taken} of {pluralize(len(leaves), 'leaves')}")
    close(0)
    return root[0]


def _node(container: Container, children: list[Any], made: set[Any]) -> Any:
    kind, name = container.node, container.class_name or ""
    if kind in ("list", "tuple") and not container.thinned:
        return children if kind == "list" else tuple(children)
    keys = node_keys(container)
    fields = zip_children(keys, children)
    if kind == "dict" or container.thinned:
        return fields
    static = dict(container.static)
    if keys is not container.keys:
        del static[KEYS]
    if (registered := _MAKERS.get(name)) is not None:
        return registered[1](fields, static)
    if name == ORDERED_DICT:
        return collections.OrderedDict(fields)
    cls = _namedtuple(name, container.keys, made) if kind == "namedtuple" else None
    return StandIn(name, fields, static) if cls is None else cls(*children)


def zip_children(keys: tuple[Any, ...], children: list[Any]) -> dict[Any, Any]:
    """Return the children of a container by their keys. Raises ``FormatError`` where two keys are equal."""
    fields = dict(zip(keys, children, strict=True))
    if len(fields) != len(keys):
        raise FormatError(f"two keys of a container are equal among {keys!r:.200}")
    return fields


def _namedtuple(name: str, fields: tuple[Any, ...], made: set[Any]) -> type | None:
    """Return a namedtuple class of that name, the same one each time; None where Python could not write it."""
    made.add((name, fields))
    if len(made) > _MOST_NAMEDTUPLES:
        problem = f"the structure has more than {_MOST_NAMEDTUPLES} different namedtuples"
        raise UnsupportedError(problem, hint="load with like=")
    return _make_namedtuple(name, fields)


@functools.lru_cache(maxsize=_MOST_NAMEDTUPLES)
def _make_namedtuple(name: str, fields: tuple[Any, ...]) -> type | None:
    module, _, short = name.rpartition(".")
    # namedtuple() writes source code of these names, so nothing but plain names gets there.
    for part in (short, *fields):
        if not (isinstance(part, str) and part.isascii() and part.isidentifier()) or keyword.iskeyword(part):
            return None
    if any(field.startswith("_") for field in fields):
        return None
    return collections.namedtuple(short, fields, module=module)  # noqa: PYI024


def key_text(key: Any) -> str:
    r"""Return the text of a key: a str is its own text, everything else is written in ASCII.

    What Python's ``repr`` shows of other characters depends on its version; so nothing here asks it.

    Example:
        >>> key_text("é"), key_text(5), key_text(b"k"), key_text(("é", 2.5, (None,)))
        ('é', '5', "b'k'", "('\\xe9', 2.5, (None,))")
    """
    kind = type(key)
    if kind is str:
        return key  # type: ignore[no-any-return]
    if kind is tuple:
        items = ", ".join(ascii(item) if type(item) is str else key_text(item) for item in key)
        return f"({items},)" if len(key) == 1 else f"({items})"
    if kind is bytes:
        return ascii(key)
    # Numbers, True, False and None are ASCII.
    return key.text if kind is ForeignKey else str(key)


def as_dicts(structure: Iterable[Token]) -> list[Token]:
    """Return the same structure with a dict in place of every container; its keys are the parts of the key texts.

    Example:
        >>> as_dicts([Container(node="list", keys=(0, 1)), 2])[0].keys
        ('0', '1')
    """
    keys = (tuple(map(key_text, token.keys)) if isinstance(token, Container) else token for token in structure)
    return [each if isinstance(each, int) else Container(node="dict", keys=each) for each in keys]
