"""``like`` against what is stored: which leaf goes where, and everything that does not fit, at once.

And the way back into the target's own containers, with what differs between its classes and those that were saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import jax
import numpy as np

from treering._format.index import ARRAY_KINDS, Container, ForeignKey, Index, LeafType, OpaqueLeaf, Token
from treering._format.leaf_values import same_value
from treering._format.selection import Selection
from treering._format.structure import KEYS, containers_of, key_text, walk
from treering._printable import MOST_LINES, kind_of, list_lines, printable, shorten
from treering._tree.each import gives_state
from treering._tree.flatten import KINDS, Flattened, flatten_like, open_node
from treering._tree.registry import is_typed_key, key_dtype, key_impl
from treering._tree.state_dict import shown_key, suggest
from treering._tree.static_values import SETTINGS
from treering._values.dtypes import is_kind_kept, lookup, number_rank, numpy_dtype
from treering._values.human import build_mismatch, pluralize
from treering._values.keys import join_key, key_name, split_key
from treering.errors import MismatchError

_PYTHON: Final[dict[str, type]] = {"bool": bool, "int": int, "float": float, "complex": complex}
_PYTHON_DTYPES: Final = {"float128": np.dtype(float), "complex256": np.dtype(complex)}
_NUMBERS: Final = ("bool", "int", "float", "complex")


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """What a stored leaf becomes."""

    kind: str
    """Kind of the leaf in the result."""
    dtype: np.dtype[Any] | None = None
    """What an array is cast to; None to leave it."""
    python: type | None = None
    """Python number that an array of no axes or another number is turned into; None to leave it."""
    impl: Any = None
    """The PRNG implementation of a key: its name, or that of the target, which may have none."""


def fit_leaf(kind: LeafType, like: Any, like_kind: str, *, cast: bool, raw_keys: bool) -> Fit | None:
    """Return how the leaf becomes one for ``like``'s place, None where it does not fit.

    Args:
        kind: what is stored.
        like: the leaf of the target.
        like_kind: its kind; "abstract" for a ``jax.ShapeDtypeStruct``, ``AS_SAVED`` for ``...``.
        cast: whether numbers may change their dtype, within their category or to a wider one.
        raw_keys: the form knows no typed keys: their uint32 data stands for them.
    """
    if like_kind == AS_SAVED:
        return Fit(kind.kind, impl=kind.impl)
    if is_typed_key(like):
        return _fit_key(kind, like, raw_keys=raw_keys)
    if like_kind == "abstract" and kind.kind == _weak_number(like):
        return Fit(kind.kind)
    if like_kind in ("jax", "numpy", "numpy scalar", "abstract"):
        return _fit_array(kind, like, like_kind, cast=cast)
    if kind.kind in ARRAY_KINDS:
        return _fit_number(kind, like_kind, cast=cast)
    if like_kind == kind.kind or {kind.kind, like_kind} == {"bytes", "bytearray"}:
        return Fit(kind.kind)
    if cast and kind.kind in _NUMBERS and like_kind in _NUMBERS[_NUMBERS.index(kind.kind) :]:
        return Fit(like_kind, python=type(like))
    return None


def _fit_key(kind: LeafType, like: Any, *, raw_keys: bool) -> Fit | None:
    data = jax.eval_shape(jax.random.key_data, like)
    if kind.shape != data.shape or kind.dtype != data.dtype.name:
        return None
    impl = kind.impl if kind.kind == "key" else key_impl(like) if raw_keys else None
    return Fit("key", impl=impl) if impl is not None and key_dtype(impl) == like.dtype else None


def _weak_number(like: Any) -> str | None:
    """Name the Python number that ``jax.eval_shape`` made an abstract leaf of; None for any other leaf.

    Such leaves are weakly typed, but for bool, which has no weak type.
    """
    if like.shape or not (getattr(like, "weak_type", False) or like.dtype == np.bool_):
        return None
    return _category(np.dtype(like.dtype).name)


def _fit_array(kind: LeafType, like: Any, like_kind: str, *, cast: bool) -> Fit | None:
    result = "jax" if like_kind in ("jax", "abstract") else like_kind
    dtype = np.dtype(like.dtype)
    number = np.dtype(_PYTHON.get(kind.kind, object)).name
    if kind.kind in _NUMBERS and cast and like.shape == () and is_kind_kept(number, dtype.name):
        return Fit(result, dtype=dtype)
    if kind.kind not in ARRAY_KINDS or kind.kind == "key" or tuple(like.shape) != kind.shape:
        return None
    if kind.dtype == dtype.name:
        # A name says nothing of the byte order, which is the target's.
        return Fit(result, dtype=None if dtype.isnative else dtype)
    return Fit(result, dtype=dtype) if cast and is_kind_kept(kind.dtype or "", dtype.name) else None


def _fit_number(kind: LeafType, like_kind: str, *, cast: bool) -> Fit | None:
    """Let a stored number of no axes stand where the target has a Python number of its category."""
    if kind.shape != () or kind.kind == "key" or like_kind not in _NUMBERS:
        return None
    if (category := _category(kind.dtype)) == like_kind:
        # Rounded as any other cast, and not made infinite by Python.
        wide = _PYTHON_DTYPES.get(kind.dtype or "") if cast else None
        return Fit(kind.kind, dtype=wide, python=_PYTHON[category] if cast else None)
    return None


def _category(dtype: str | None) -> str:
    """Return the Python type of numbers of a dtype; no text for times and unknown dtypes."""
    rank = number_rank(_named(dtype).name)
    return "" if rank is None else ("bool", "int", "int", "float", "complex")[rank]


def _named(dtype: str | None) -> np.dtype[Any]:
    known = lookup(dtype or "")
    return numpy_dtype(known) if known is not None else np.dtype(object)


def stored_dtype(kind: LeafType) -> np.dtype[Any] | None:
    """Return the dtype of what lies in the files of a leaf; None where nothing does."""
    return _named(kind.dtype) if kind.stored else None


def found_text(kind: LeafType) -> str:
    """Describe a stored leaf: its dtype and shape, or its Python type."""
    if kind.kind == "key":
        return f"key<{kind.impl}>{list((kind.shape or ())[:-1])}"
    if kind.kind in ARRAY_KINDS:
        return f"{kind.dtype}{list(kind.shape or ())}"
    return "None" if kind.kind == "none" else "a function or setting" if kind.kind == "opaque" else kind.kind


def wanted_text(like: Any, like_kind: str) -> str:
    """Describe a leaf of the target in the same words."""
    if is_typed_key(like):
        return f"key<{key_impl(like)}>{list(like.shape)}"
    if like_kind == AS_SAVED:
        return "`...`"
    if like_kind in ("jax", "numpy", "numpy scalar", "abstract"):
        return f"{np.dtype(like.dtype).name}{list(like.shape)}"
    if like_kind == "opaque" and not (callable(like) or isinstance(like, (OpaqueLeaf, *SETTINGS))):
        return kind_of(like)
    return "None" if like_kind == "none" else "a function or setting" if like_kind == "opaque" else like_kind


AS_SAVED: Final = "as saved"
"""The kind of the leaves of a target that stand for what was saved there: ``...`` in ``like``."""


def expand_ellipses(
    target: Flattened, part: Selection, rename: Mapping[str, str]
) -> tuple[Flattened, dict[int, Selection]]:
    """Return a target in which leaves of what was saved stand in the place of each ``...``.

    Args:
        target: ``like``, flattened.
        part: what is loaded of the stored tree.
        rename: wanted key -> stored key, of leaves or of branches.

    Returns:
        The target, and for each ``...`` where a container was saved its number among the leaves, and that container.

    Raises:
        MismatchError: a renaming covers no key.
    """
    if "opaque" not in target.kinds or not any(leaf is ... for leaf in target.leaves):
        return target, {}
    sources = apply_renames(target.keys, rename)
    places = {n: sources.get(target.keys[n], target.keys[n]) for n, leaf in enumerate(target.leaves) if leaf is ...}
    found = subtrees(part, set(places.values()).difference(part.keys))
    rows: list[tuple[str, Any, str]] = []
    for number, (key, leaf, kind) in enumerate(zip(target.keys, target.leaves, target.kinds, strict=True)):
        source = places.get(number, "")
        if number in places and (below := found.get(source)) is not None:
            above, depth = split_key(key), len(split_key(source))
            rows += [(join_key((*above, *split_key(name)[depth:])), ..., AS_SAVED) for name in below.keys]
        else:
            rows.append((key, leaf, AS_SAVED if number in places else kind))
    expanded = dataclasses.replace(
        target, keys=[row[0] for row in rows], leaves=[row[1] for row in rows], kinds=[row[2] for row in rows]
    )
    return expanded, {number: found[source] for number, source in places.items() if source in found}


def subtrees(part: Selection, keys: Collection[str]) -> dict[str, Selection]:
    """Return the containers at some keys as parts of their own, with the keys that their leaves have in ``part``.

    Example:
        >>> from treering._format.selection import select
        >>> part = select([Container(node="dict", keys=("a", "b")), Container(node="list", keys=(0,)), 2],
        ...               ["a/0", "b"], at=None, only=None)
        >>> subtrees(part, {"a", "b"})["a"].keys
        ['a/0']
    """
    begun: list[tuple[int, str, list[Token], int]] = []
    found: dict[str, Selection] = {}
    path: list[str] = []
    heads: list[Container] = []
    leaf = 0

    def close(depth: int) -> None:
        while begun and begun[-1][0] >= depth:
            _, key, tokens, first = begun.pop()
            found[key] = Selection(
                structure=tokens, leaves=list(part.leaves[first:leaf]), keys=list(part.keys[first:leaf])
            )

    for depth, place, token in walk(part.structure):
        close(depth)
        del path[max(0, depth - 1) :], heads[depth:]
        if isinstance(token, Container):
            path += [key_text(heads[-1].keys[place])] if depth else []
            heads.append(token)
            if (key := join_key(path)) in keys:
                begun.append((depth, key, [], leaf))
        for _, _, tokens, _ in begun:
            tokens.append(token)
        leaf += 0 if isinstance(token, Container) else token
    close(0)
    return found


KEPT: Final = Fit("kept")
"""The leaf of ``like`` stays."""


@dataclasses.dataclass(frozen=True, slots=True)
class Matches:
    """What becomes of the leaves of a result, in columns of equal length."""

    leaves: list[int]
    """Number of each stored leaf; -1 where ``like``'s own value is kept."""
    fits: list[Fit]
    """What each leaf becomes; arrays that are alike share one object."""


def match_stored(index: Index, selection: Selection) -> Matches:
    """Return for every stored leaf of a part that it comes back as what it was."""
    fits = [Fit(leaf_type.kind, impl=leaf_type.impl) for leaf_type in index.types]
    return Matches(list(selection.leaves), [fits[index.leaf_types[leaf]] for leaf in selection.leaves])


def array_dtype(kind: LeafType, fit: Fit) -> np.dtype[Any] | None:
    """Return the dtype of a leaf that may go on devices, None for any other."""
    if fit.kind not in ("jax", "key", "numpy"):
        return None
    return fit.dtype if fit.dtype is not None else stored_dtype(kind)


def aval_shape(kind: LeafType, fit: Fit) -> tuple[int, ...]:
    """Return the shape of such a leaf; that of keys is without their data."""
    shape = kind.shape or ()
    return shape[:-1] if fit.kind == "key" else shape


@dataclasses.dataclass(frozen=True, slots=True)
class Wording:
    """How the caller speaks to its user."""

    called: str = "like"
    """What the target is called."""
    advice: str = ""
    """What comes before advice about the arguments of ``treering.load``, where it is another function that speaks."""
    takes_extra: bool = False
    """Whether that function takes ``extra=`` itself."""
    stored: str = "the checkpoint"
    """What the tree is compared with."""
    is_part: bool = False
    """Whether that is a part of a tree."""
    why_absent: Callable[[str], str] = lambda _: ""
    """Says of a key that is not among those that are loaded which argument left it out; no text where none did."""


def match_leaves(
    index: Index,
    selection: Selection,
    target: Flattened,
    *,
    rename: Mapping[str, str] | None,
    missing: Literal["error", "keep", "leave"],
    cast: bool,
    raw_keys: bool,
    extra: Literal["error", "ignore"] = "error",
    wording: Wording = Wording(),
) -> Matches:
    """Return for every leaf of ``like`` the stored leaf that goes there.

    Args:
        index: what is stored.
        selection: which part of it takes part.
        target: ``like``, flattened.
        rename: wanted key -> stored key, of leaves or of branches.
        missing: what to do where nothing is stored for a leaf; "leave" keeps abstract ones too.
        extra: what to do about stored leaves for which ``like`` has no place.
        cast: as of ``fit_leaf``.
        raw_keys: as of ``fit_leaf``.
        wording: how the differences are told.

    Raises:
        MismatchError: with one line for each difference.
    """
    sources = apply_renames(target.keys, rename or {})
    numbers, unexpected = _find_stored(index, selection, target, sources)
    report = _Report(wording, unexpected, ignored=extra == "ignore", keeps=missing == "keep")
    result = Matches([], [])
    arrays = {number for number, type_ in enumerate(index.types) if type_.kind in ARRAY_KINDS}
    known: dict[Any, Fit] = {}
    for number, key, kind, leaf in zip(numbers, target.keys, target.kinds, target.leaves, strict=True):
        if number is None:
            if missing == "leave" or (missing == "keep" and kind not in ("abstract", AS_SAVED)):
                result.leaves.append(-1)
                result.fits.append(KEPT)
                report.kept.append((key, leaf, kind))
            else:
                report.add_missing(key, sources.get(key, key), leaf, kind)
            continue
        # Thousands of arrays are of a few dtypes and shapes: the answer is the same for each of them.
        type_ = index.leaf_types[number]
        is_array = type_ in arrays and kind in ("jax", "numpy", "abstract")
        alike = (type_, kind, leaf.dtype, leaf.shape) if is_array else (type_, kind) if kind == AS_SAVED else key
        if (fit := known.get(alike)) is None:
            stored_type = index.types[type_]
            if (fit := fit_leaf(stored_type, leaf, kind, cast=cast, raw_keys=raw_keys)) is None:
                differs = f"wanted {wanted_text(leaf, kind)}, found {found_text(stored_type)}"
                report.lines.append(f"{shown_key(key)}: {differs}")
                report.castable |= not cast and bool(fit_leaf(stored_type, leaf, kind, cast=True, raw_keys=raw_keys))
                continue
            known[alike] = fit
        result.leaves.append(number)
        result.fits.append(fit)
    report.raise_if_any()
    return result


def _find_stored(
    index: Index, selection: Selection, target: Flattened, sources: Mapping[str, str]
) -> tuple[Sequence[int | None], dict[str, str]]:
    """Return what is stored for each leaf of ``like``, None where nothing is; and what is stored and not wanted."""
    if not sources and list(selection.keys) == target.keys:
        return selection.leaves, {}
    stored = dict(zip(selection.keys, selection.leaves, strict=True))
    wanted = [sources.get(key, key) for key in target.keys]
    left = set(stored).difference(wanted)
    # Orbax notes a namedtuple without fields, such as many a state of an optimizer, as None: that is wanted.
    nothing = {key for key in left if not index.is_exact and index.type_of(stored[key]).kind == "none"}
    if nothing:
        containers = containers_of(target.tokens)
        left -= nothing & {join_key(path) for path, one in containers if (one.node, one.keys) == ("namedtuple", ())}
    unexpected = {key: found_text(index.type_of(number)) for key, number in stored.items() if key in left}
    return list(map(stored.get, wanted)), unexpected


def apply_renames(keys: Sequence[str], rename: Mapping[str, str]) -> dict[str, str]:
    """Return wanted key -> stored key for every key that a renaming covers; the longest one wins.

    Raises:
        MismatchError: a renaming covers no key.

    Example:
        >>> apply_renames(["a/w", "a/b", "c"], {"a": "x", "a/w": "k"})
        {'a/w': 'k', 'a/b': 'x/b'}
    """
    if not rename:
        return {}
    known = {split_key(wanted): (wanted, source) for wanted, source in rename.items()}
    lengths = sorted(set(map(len, known)), reverse=True)
    result: dict[str, str] = {}
    idle, shadowed = set(rename), set[str]()
    for key in keys:
        parts = split_key(key)
        covering = [found for length in lengths if length <= len(parts) and (found := known.get(parts[:length]))]
        for text, source in covering[:1]:
            result[key] = join_key((*split_key(source), *parts[len(split_key(text)) :]))
            idle.discard(text)
        shadowed.update(text for text, _ in covering[1:])
    if idle:
        what, hint = "`like` has no such key", "it maps wanted keys to saved keys"
        if min(idle) in shadowed:
            what, hint = "longer entries cover all that is below it in `like`", "remove the entry"
        raise MismatchError(f"key_map= has {min(idle)!r}, but {what}", hint=hint)
    return result


@dataclasses.dataclass(slots=True)
class _Report:
    """What does not fit, in the order of ``like``."""

    wording: Wording
    unexpected: dict[str, str]
    """What is stored and has no place in ``like``: its key, and what it is."""
    ignored: bool
    """Whether what is unexpected is no difference."""
    keeps: bool
    """Whether leaves for which nothing is stored stay, if they are not abstract."""
    kept: list[tuple[str, Any, str]] = dataclasses.field(default_factory=list)
    lines: list[str] = dataclasses.field(default_factory=list)
    missing: list[str] = dataclasses.field(default_factory=list)
    """Keys of ``like`` for which nothing is stored."""
    castable: bool = False
    stateful: bool = False
    """Whether ``like`` has an iterator, or another object that gives its state away."""

    def add_missing(self, key: str, source: str, leaf: Any, kind: str) -> None:
        """Note that nothing is stored for a leaf of ``like``."""
        self.missing.append(key)
        self.stateful |= gives_state(type(leaf))
        wanted = wanted_text(leaf, kind)
        where = "" if source == key else f" (looked for {shown_key(source)!r})"
        kept = "; it is abstract, so there is nothing to keep" if self.keeps else ""
        why = ""
        if len(self.lines) < MOST_LINES:
            why = self.wording.why_absent(source) or suggest(source, wanted, self.unexpected)
        self.lines.append(f"{shown_key(key)}: missing{where}, `{self.wording.called}` has {wanted}{why}{kept}")

    def raise_if_any(self) -> None:
        """Raise the one error that names them all."""
        found, called = self.lines, self.wording.called
        if not self.ignored:
            kept = {key: wanted_text(leaf, kind) for key, leaf, kind in self.kept} if self.unexpected else {}
            found += [
                f"{shown_key(key)}: unexpected, the checkpoint has {kind}"
                + (suggest(key, kind, kept, f" of `{called}`") if number < MOST_LINES else "")
                for number, (key, kind) in enumerate(self.unexpected.items())
            ]
        if found:
            hint = self._hint()
            count = pluralize(len(found), "differences")
            message = f"{count} between `{called}` and {self.wording.stored}:{list_lines(found)}"
            raise build_mismatch(f"{message}\n  {hint}" if hint else message, found)

    def _hint(self) -> str:
        called = self.wording.called
        if called == "like" and "" in self.missing:
            return "`like` is one leaf, not a tree; jax.eval_shape(init) makes a tree of a function; at= loads a part"
        leave = self.unexpected and not self.ignored and 'extra="ignore" ignores leaves that only the checkpoint has'
        renamed = (self.missing or self.kept) and self.unexpected
        is_dotted = any("/" in key and key.replace("/", ".") in self.unexpected for key in self.missing)
        hints = [
            self.stateful and "run.load(like=...) of a `treering.Run` gives iterators their state back",
            is_dotted and 'key_map=KeyMap([KeyRule("{a}.{b}", "{a}/{b}")]) nests names of two parts; a rule a depth',
            self.missing and self.wording.is_part and "load([base, part], like) puts a part over the rest of its tree",
            self.castable and f"cast=True converts numbers to the dtypes of `{called}`, within a category",
            self.missing and not self.keeps and f'missing="keep" keeps what `{called}` has',
            leave and not self.wording.takes_extra and f"{leave}, only= and at= load a part",
            renamed and not is_dotted and "key_map={wanted: saved} maps renamed leaves",
        ]
        told = "; ".join(str(hint) for hint in hints if hint)
        advice = self.wording.advice + told if told else ""
        return "; ".join(str(hint) for hint in (leave, advice) if hint) if self.wording.takes_extra else advice


_LONGEST: Final = 120


def unflatten(like: Any, leaves: Sequence[Any]) -> Any:
    """Return a tree of ``like``'s containers around other leaves; nothing of ``like`` is changed.

    Classes, static fields, the order of dicts and their keys are those of ``like``. A dataclass that nobody
    registered is copied and its fields are set; its other attributes are those of ``like``'s instance.

    Args:
        like: any tree that ``flatten_like`` takes.
        leaves: one for each leaf of ``like``, in the order of ``flatten_like(like)``.

    Raises:
        ValueError: another number of leaves.

    Example:
        >>> unflatten({"b": [1, 2], "a": None}, [7, 8, 9])
        {'b': [7, 8], 'a': 9}
    """
    taken, known = 0, {*KINDS, jax.ShapeDtypeStruct}
    root: list[Any] = []
    # A level: the children of like's node still to come, those of the new node, and the dict in like or what makes one.
    levels: list[tuple[Iterator[Any], list[Any], Any]] = [(iter((like,)), root, list)]
    while levels:
        children, results, _ = levels[-1]
        for child in children:
            is_dict = type(child) is dict  # layers are many small ones, and what a file says of them is not needed
            node = None if is_dict or type(child) in known else open_node(child)
            inner: Collection[Any] | None = child.values() if is_dict else None if node is None else node.children
            make = child if node is None else node.rebuild
            if inner is not None and not known.issuperset(map(type, inner)):
                levels.append((iter(inner), [], make))
                break
            stop = taken + (1 if inner is None else len(inner))
            if stop > len(leaves):
                raise ValueError(f"like has more leaves than the {len(leaves)} that were given")
            results.append(leaves[taken] if inner is None else _close(make, list(leaves[taken:stop])))
            taken = stop
        else:
            _, results, make = levels.pop()
            if levels:
                levels[-1][1].append(_close(make, results))
    if taken != len(leaves):
        raise ValueError(f"like has {pluralize(taken, 'leaves')}, {len(leaves)} were given")
    return root[0]


def _close(make: Any, children: list[Any]) -> Any:
    return dict(zip(make, children, strict=True)) if type(make) is dict else make(children)


def static_differences(saved: Sequence[Token], like: Sequence[Token], *, called: str = "like") -> list[str]:
    """Return one line for each container of ``like`` whose class or static fields are not those that were saved.

    Containers are compared at equal key paths; one that only one side has is no difference here. ``called`` is what the
    user calls ``like``.

    Example:
        >>> saved = [Container(node="other", keys=("w",), class_name="m.Layer", static=(("act", "relu"),)), 1]
        >>> like = [Container(node="other", keys=("w",), class_name="m.Layer", static=(("act", "gelu"),)), 1]
        >>> static_differences(saved, like)
        ["(the root): act of m.Layer: saved 'relu', like has 'gelu'"]
    """
    # Dicts, of which there are the most, differ from nothing but what is none.
    here, wanted = dict(_others_than_dicts(saved)), dict(_others_than_dicts(like))
    if here.keys() != wanted.keys():
        here, wanted = dict(containers_of(saved)), dict(containers_of(like))
    lines: list[str] = []
    for path, container in here.items():
        if (other := wanted.get(path)) is not None:
            where = key_name(join_key(path))
            lines += [f"{where}: {line}" for line in _differences(container, other, called)]
    return lines


def _others_than_dicts(tokens: Sequence[Token]) -> Iterator[tuple[tuple[str, ...], Container]]:
    """Yield the containers of a structure that are no dicts, with their key paths."""
    if all(isinstance(token, int) or token.node == "dict" for token in tokens):
        return
    heads: list[Container] = []
    places: list[int] = []
    for depth, place, token in walk(tokens):
        if isinstance(token, Container):
            del heads[depth:], places[depth:]
            heads.append(token)
            places.append(place)
            if token.node != "dict":
                yield tuple(key_text(head.keys[at]) for head, at in zip(heads, places[1:], strict=False)), token


def _differences(saved: Container, like: Container, called: str) -> Iterator[str]:
    if saved.thinned and "dict" in (saved.node, like.node):
        return  # as it comes back without like, or as a part of a tree is saved
    if _described_node(saved) != _described_node(like):
        yield f"saved as {_described_node(saved)}, {called} has {_described_node(like)}"
        return
    static, wanted = dict(saved.static), dict(like.static)
    for name in {**static, **wanted}:
        if name == KEYS and saved.keys != like.keys:
            continue  # other keys are other leaves, which is said of them
        if name not in static:
            yield f"{name} of {_described_node(like)}: not saved, {called} has {_shown_value(wanted[name])}"
        elif name not in wanted:
            yield f"{name} of {_described_node(like)}: saved {_shown_value(static[name])}, {called} has none"
        elif not same_value(static[name], wanted[name]):
            yield f"{name} of {_described_node(like)}: saved {difference(static[name], wanted[name], called)}"


def difference(saved: Any, here: Any, called: str) -> str:
    """Say what was saved and what ``like`` has instead; two values may have the same text.

    Example:
        >>> difference("relu", "gelu", "like"), difference(0.5, 0.5, "like")
        ("'relu', like has 'gelu'", '0.5, like has another value with the same text')
    """
    texts = _shown_value(saved), _shown_value(here)
    return f"{texts[0]}, {called} has {texts[1] if texts[0] != texts[1] else 'another value with the same text'}"


def _described_node(container: Container) -> str:
    return container.class_name or container.node


def _shown_value(value: Any) -> str:
    text = value.text if isinstance(value, ForeignKey | OpaqueLeaf) else repr(value)
    return shorten(printable(text), _LONGEST)


def uncompared(tree: Any) -> dict[str, str]:
    """Return what in the functions and static fields of ``tree`` ``load`` cannot compare.

    ``load`` warns where those of ``like`` are not those that were saved. It compares digests of their whole values:
    arrays by dtype, shape and bytes, containers and dataclasses by what they hold, functions by their names. Two things
    are left out. What a function closes over and its code take no part. An object of another class has no digest, nor
    has anything that holds it; ``load`` compares the first 400 characters of its repr.

    Args:
        tree: any pytree: what you save, a ``like``, or what ``load`` gives.

    Returns:
        Key of the leaf, or key of the node, a point and name of the field -> what in it is left out.

    Example:
        >>> import dataclasses, jax
        >>> @jax.tree_util.register_dataclass
        ... @dataclasses.dataclass
        ... class Layer:
        ...     weight: object
        ...     table: object = dataclasses.field(metadata={"static": True})
        >>> uncompared({"a": Layer(1.0, {"rate": 0.5}), "b": Layer(2.0, {"hook": object()}), "f": [max, lambda x: x]})
        {'b.table': 'a builtins.object', 'f/1': 'the inside of treering._tree.likeness.<lambda>'}
    """
    flat = flatten_like(tree)
    nodes = containers_of(flat.tokens)
    found = [(f"{join_key(path)}.{name}", value) for path, node in nodes for name, value in node.static]
    found += [(flat.keys[number], value) for number, value in flat.opaque.items()]
    return {place: value.left_out or "it was saved without a digest" for place, value in _find_left_out(found)}


def _find_left_out(found: list[tuple[str, Any]]) -> Iterator[tuple[str, ForeignKey | OpaqueLeaf]]:
    for place, value in found:
        if isinstance(value, tuple):
            yield from _find_left_out([(f"{place}[{number}]", item) for number, item in enumerate(value)])
        elif isinstance(value, ForeignKey | OpaqueLeaf) and (value.left_out or value.digest is None):
            yield place, value
