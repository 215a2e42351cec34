"""``like`` against what is stored: which leaf goes where, and everything that does not fit, at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from treering._format.index import ARRAY_KINDS, Index
from treering._format.selection import Selection
from treering._printable import MOST_LINES, list_lines
from treering._tree.fit import Fit, fit_leaf, found_text, stored_dtype, wanted_text
from treering._tree.flatten import Flattened
from treering._tree.state_dict import shown_key, suggest
from treering._tree.unflatten import containers_of
from treering._values.human import build_mismatch, pluralize
from treering._values.keys import join_key, split_key
from treering.errors import Mismatch

if TYPE_CHECKING:
    import numpy as np

KEPT: Final = Fit("kept")
"""The leaf of ``like`` stays."""


@dataclasses.dataclass(frozen=True, slots=True)
class LeafMatch:
    """What becomes of one leaf of the result."""

    leaf: int
    """Number of the stored leaf; -1 where ``like``'s own value is kept."""
    fit: Fit
    """What it becomes."""


def match_stored(index: Index, selection: Selection) -> list[LeafMatch]:
    """Return for every stored leaf of a part that it comes back as what it was."""
    fits = [Fit(leaf_type.kind, impl=leaf_type.impl) for leaf_type in index.types]
    return [LeafMatch(leaf, fits[index.leaf_types[leaf]]) for leaf in selection.leaves]


def array_dtype(index: Index, match: LeafMatch) -> np.dtype[Any] | None:
    """Return the dtype of a leaf that may go on devices, None for any other."""
    if match.fit is KEPT or match.fit.kind not in ("jax", "key", "numpy"):
        return None
    return match.fit.dtype if match.fit.dtype is not None else stored_dtype(index.type_of(match.leaf))


def aval_shape(index: Index, match: LeafMatch) -> tuple[int, ...]:
    """Return the shape of such a leaf; that of keys is without their data."""
    shape = index.type_of(match.leaf).shape or ()
    return shape[:-1] if match.fit.kind == "key" else shape


@dataclasses.dataclass(frozen=True, slots=True)
class Wording:
    """How the caller speaks to its user."""

    called: str = "like"
    """What the target is called."""
    advice: str = ""
    """What comes before advice about the arguments of ``treering.load``, where it is another function that speaks."""
    takes_extra: bool = False
    """Whether that function takes ``extra=`` itself."""


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
) -> list[LeafMatch]:
    """Return for every leaf of ``like`` the stored leaf that goes there.

    Args:
        index: what is stored.
        selection: which part of it takes part.
        target: ``like``, flattened.
        rename: wanted key -> stored key, of leaves or of branches.
        missing: what to do where nothing is stored for a leaf; "leave" keeps abstract ones too.
        extra: what to do about stored leaves for which ``like`` has no place.
        cast: see ``fitted``.
        raw_keys: see ``fitted``.
        wording: how the differences are told.

    Raises:
        Mismatch: with one line for each difference.
    """
    stored = dict(zip(selection.keys, selection.leaves, strict=True))
    sources = apply_renames(target.keys, rename or {})
    wanted = {sources.get(key, key) for key in target.keys}
    unexpected = _list_unexpected(index, stored, wanted, target)
    report = _Report(wording, unexpected, ignored=extra == "ignore", keeps=missing == "keep")
    result, fits = list[LeafMatch](), dict[Any, Fit | None]()
    for key, kind, leaf in zip(target.keys, target.kinds, target.leaves, strict=True):
        source = sources.get(key, key)
        if (number := stored.get(source)) is None:
            if missing == "leave" or (missing == "keep" and kind != "abstract"):
                result.append(LeafMatch(-1, KEPT))
                report.kept.append((key, leaf, kind))
            else:
                report.add_missing(key, source, wanted_text(leaf, kind))
            continue
        type_ = index.type_of(number)
        # Thousands of arrays are of a few dtypes and shapes: the answer is the same for each of them.
        arrays = kind in ("jax", "numpy", "abstract") and type_.kind in ARRAY_KINDS
        alike = (index.leaf_types[number], kind, leaf.dtype, leaf.shape) if arrays else key
        if alike not in fits:
            fits[alike] = fit_leaf(type_, leaf, kind, cast=cast, raw_keys=raw_keys)
        if (fit := fits[alike]) is None:
            report.lines.append(f"{_shown(key)}: wanted {wanted_text(leaf, kind)}, found {found_text(type_)}")
            report.castable |= not cast and fit_leaf(type_, leaf, kind, cast=True, raw_keys=raw_keys) is not None
        else:
            result.append(LeafMatch(number, fit))
    report.raise_if_any()
    return result


def _list_unexpected(
    index: Index, stored: Mapping[str, int], wanted: Collection[str], target: Flattened
) -> dict[str, str]:
    """Return what is stored and not wanted.

    Orbax notes a namedtuple without fields, such as many a state of an optimizer, as None: that is wanted.
    """
    found = {key: found_text(index.type_of(number)) for key, number in stored.items() if key not in wanted}
    nothing = {key for key in found if not index.is_exact and index.type_of(stored[key]).kind == "none"}
    if nothing:
        containers = containers_of(target.tokens)
        nothing &= {join_key(path) for path, one in containers if (one.node, one.keys) == ("namedtuple", ())}
    return {key: text for key, text in found.items() if key not in nothing}


def apply_renames(keys: Sequence[str], rename: Mapping[str, str]) -> dict[str, str]:
    """Return wanted key -> stored key for every key that a renaming covers; the longest one wins.

    Raises:
        Mismatch: a renaming covers no key.

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
            rest = key.split("/")[len(split_key(text)) :] if key else []
            result[key] = "/".join([source, *rest]) if source else "/".join(rest)
            idle.discard(text)
        shadowed.update(text for text, _ in covering[1:])
    if idle:
        what, hint = "`like` has no such key", "it maps wanted keys to saved keys"
        if min(idle) in shadowed:
            what, hint = "longer entries cover all that is below it in `like`", "remove the entry"
        raise Mismatch(f"rename has {min(idle)!r}, but {what}", hint=hint)
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

    def add_missing(self, key: str, source: str, wanted: str) -> None:
        """Note that nothing is stored for a leaf of ``like``."""
        self.missing.append(key)
        where = "" if source == key else f" (looked for {_shown(source)!r})"
        kept = "; it is abstract, so there is nothing to keep" if self.keeps else ""
        close = suggest(source, wanted, self.unexpected) if len(self.lines) < MOST_LINES else ""
        self.lines.append(f"{_shown(key)}: missing{where}, `{self.wording.called}` has {wanted}{close}{kept}")

    def raise_if_any(self) -> None:
        """Raise the one error that names them all."""
        found, called = self.lines, self.wording.called
        if not self.ignored:
            kept = {key: wanted_text(leaf, kind) for key, leaf, kind in self.kept} if self.unexpected else {}
            found += [
                f"{_shown(key)}: unexpected, the checkpoint has {kind}"
                + (suggest(key, kind, kept, f" of `{called}`") if number < MOST_LINES else "")
                for number, (key, kind) in enumerate(self.unexpected.items())
            ]
        if found:
            hint = self._hint()
            count = pluralize(len(found), "differences")
            message = f"{count} between `{called}` and the checkpoint:{list_lines(found)}"
            raise build_mismatch(f"{message}\n  {hint}" if hint else message, found)

    def _hint(self) -> str:
        called = self.wording.called
        if called == "like" and "" in self.missing:
            return "`like` is one leaf, not a tree; jax.eval_shape(init) makes a tree of a function; at= loads a part"
        leave = self.unexpected and not self.ignored and 'extra="ignore" ignores leaves that only the checkpoint has'
        hints = [
            self.castable and f"cast=True converts numbers to the dtypes of `{called}`, within a category",
            self.missing and not self.keeps and f'missing="keep" keeps what `{called}` has',
            leave and not self.wording.takes_extra and f"{leave}, only= and at= load a part",
            (self.missing or self.kept) and self.unexpected and "key_map={wanted: saved} maps renamed leaves",
        ]
        told = "; ".join(str(hint) for hint in hints if hint)
        advice = self.wording.advice + told if told else ""
        return "; ".join(str(hint) for hint in (leave, advice) if hint) if self.wording.takes_extra else advice


def _shown(key: str) -> str:
    return shown_key(key) or "the whole tree"
