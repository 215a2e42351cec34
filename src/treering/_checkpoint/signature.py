"""What each process says of its tree before a joint save: a few bytes for each leaf, and of what it holds alone.

Leaves are compared by key, kind, dtype, shape and by who holds which box; what they hold is not. A leaf that a process
holds alone is taken from process 0, whatever the others have in its place, so how it is cut there says nothing.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Sequence
from typing import Final

import xxhash

from treering._arrays.host import host_blocks
from treering._arrays.outgoing import DescribedLeaves, HeldBoxes
from treering._codec.documents import json_text
from treering._format.index import Container, LeafType
from treering._format.leaf_values import encode_value
from treering._tree.flatten import Flattened
from treering._values.boxes import text_of
from treering._values.checksums import pack_checksums, unpack_checksums
from treering._values.human import build_mismatch, join_first, pluralize
from treering._values.processes import format_processes
from treering.errors import MismatchError

_BYTES: Final = 8
_SHOWN: Final = 10
_SHOWN_BOXES: Final = 4
_NOTHING: Final = 0
_STATES_HINT: Final = (
    "a step holds the state of an iterator once, for all processes: mark one that has another state in each process, "
    "{'data': treering.each(iterator)}, or let it give the same state on all of them, such as a count of batches"
)


def signature_of(flat: Flattened, leaves: DescribedLeaves) -> bytes:
    """Return 8 bytes for each leaf, then 8 for the containers; they are equal on all processes that may save together.

    Example:
        >>> from treering._arrays.outgoing import describe_leaves
        >>> from treering._tree.flatten import flatten
        >>> one, other = flatten({"a": 1.5, "b": 2}), flatten({"a": 2.5, "b": 2.0})
        >>> mine, theirs = signature_of(one, describe_leaves(one)), signature_of(other, describe_leaves(other))
        >>> mine[:8] == theirs[:8], mine[8:16] == theirs[8:16], mine[16:] == theirs[16:]
        (True, False, True)
    """
    known: dict[tuple[int, int], bytes] = {}
    signature = array("Q")
    for number, key in enumerate(flat.keys):
        kind, held = leaves.leaf_types[number], leaves.shared_by(number)
        if (facts := known.get((kind, id(held)))) is None:
            facts = known[kind, id(held)] = _facts(leaves.types[kind], held)
        signature.append(_leaf_digest(key, facts))
    # Not the keys, which those of the leaves begin with, nor static fields: their texts may name addresses in memory.
    nodes = [(one.node, one.class_name, len(one.keys)) if isinstance(one, Container) else one for one in flat.tokens]
    signature.append(xxhash.xxh3_64_intdigest(repr(nodes).encode()))
    return pack_checksums(signature)


def claim_leaves(flat: Flattened, leaves: DescribedLeaves, theirs: bytes, this: int) -> DescribedLeaves:
    """Return the leaves as process 0 sees them, as far as that cannot be known here.

    An array that lies on this process's devices alone looks the same here whether each process has one of its own, or
    all mean this very one. Process 0 can tell: it has an array of its own, or a handle on this one.

    Args:
        flat: the tree.
        leaves: its leaves.
        theirs: process 0's signature.
        this: number of this process, not 0.
    """
    mine = signature_of(flat, leaves)
    if len(theirs) != len(mine) or theirs == mine:
        return leaves
    spread = dict(leaves.spread)
    equal: dict[HeldBoxes, HeldBoxes] = {held: held for held in spread.values()}
    for number, kind in enumerate(flat.kinds):
        if kind in ("jax", "key") and number not in spread and _part(theirs, number) != _part(mine, number):
            held = tuple((source.box, (this,)) for source in leaves.sources[number])
            digest = _leaf_digest(flat.keys[number], _facts(leaves.types[leaves.leaf_types[number]], held))
            if pack_checksums(array("Q", [digest])) == _part(theirs, number):
                spread[number] = equal.setdefault(held, held)
    return leaves if len(spread) == len(leaves.spread) else dataclasses.replace(leaves, spread=spread)


def match_signature(
    flat: Flattened, leaves: DescribedLeaves, theirs: bytes, this: int, below: Sequence[str] = ()
) -> DescribedLeaves:
    """Return the leaves as process 0 sees them (`claim_leaves`), compared with its signature.

    Args:
        flat: the tree.
        leaves: its leaves.
        theirs: process 0's signature.
        this: number of this process, not 0.
        below: the keys of states of iterators, for which there is another advice.

    Raises:
        MismatchError: they differ; the first few leaves that do are named.

    Example:
        >>> from treering._arrays.outgoing import describe_leaves
        >>> from treering._tree.flatten import flatten
        >>> flat = flatten({"w": 7})
        >>> match_signature(flat, describe_leaves(flat), b"8765432187654321", 1)
        Traceback (most recent call last):
            ...
        treering.errors.MismatchError: the tree of process 0 differs:
          leaf 'w' differs from that of process 0; here it is int
    """
    leaves = claim_leaves(flat, leaves, theirs, this)
    mine, keys = signature_of(flat, leaves), flat.keys
    if theirs == mine:
        return leaves
    differing = [n for n in range(len(keys)) if _part(theirs, n) != _part(mine, n)]
    if len(theirs) != len(mine):
        found = f"process 0 has {pluralize(len(theirs) // _BYTES - 1, 'leaves')}, this process {len(keys)}"
        first = f"; the first difference is {keys[differing[0]]!r:.200}" if differing else ""
        # Where one of them goes on, what comes next is the first that differs.
        near = keys[max(0, differing[0] - 1) : differing[0] + 1] if differing else keys[-1:]
        hint = _STATES_HINT if any(map(_is_below(below), near)) else None
        raise MismatchError(f"the processes have different trees: {found}{first}", hint=hint)
    if not differing:
        nodes = [one.class_name or one.node for one in flat.tokens if isinstance(one, Container)]
        found = f"here they are, from the root on, {join_first(nodes, _SHOWN)}"
        what = f"the containers of the tree are not those of process 0, though the leaves are; {found}"
        raise MismatchError(what, hint=_STATES_HINT if below else None)
    text = "leaf {!r:.200} differs from that of process 0; here it is {}"
    lines = [text.format(keys[n], leaf_text(leaves, n)) for n in differing[:_SHOWN]]
    hint = _STATES_HINT if any(_is_below(below)(keys[n]) for n in differing) else ""
    raise _mismatch("the tree of process 0 differs:", lines, len(differing), hint)


def _mismatch(what: str, lines: Sequence[str], count: int, hint: str = "") -> MismatchError:
    more = [f"and {count - _SHOWN} more"] if count > _SHOWN else []
    text = "\n".join([what, *(f"  {line}" for line in [*lines[:_SHOWN], *more]), *filter(None, [hint])])
    return build_mismatch(text, lines)


def leaf_text(leaves: DescribedLeaves, leaf: int) -> str:
    """Return for people what a leaf is to this process.

    Example:
        >>> import numpy as np
        >>> from treering._arrays.outgoing import describe_leaves
        >>> from treering._tree.flatten import flatten
        >>> leaf_text(describe_leaves(flatten({"w": np.zeros((2, 3), "f4")})), 0)
        'numpy float32 [2, 3], held by each process alone'
    """
    kind = leaves.types[leaves.leaf_types[leaf]]
    if not kind.stored:
        return kind.kind
    what = f"{kind.kind} {kind.dtype} {list(kind.shape or ())}"
    if (held := leaves.shared_by(leaf)) is None:
        return f"{what}, held by each process alone"
    boxes = [f"[{text_of(box)}] by {format_processes(owners)}" for box, owners in held[:_SHOWN_BOXES]]
    more = f" and {pluralize(len(held) - _SHOWN_BOXES, 'more boxes')}" if len(held) > _SHOWN_BOXES else ""
    return f"{what}, held: {', '.join(boxes)}{more}"


def local_digests(flat: Flattened, leaves: DescribedLeaves, below: Sequence[str] = ()) -> bytes:
    """Return 8 bytes for each leaf that a process holds alone, in the order of the leaves: a digest of what it holds.

    A leaf of which this process holds nothing has eight zeros. With ``below``, leaves at or below these keys count.
    """
    digests = array("Q")
    for number in _local(flat.keys, leaves, below):
        if number in leaves.values:
            value = encode_value(flat.kinds[number], leaves.values[number])
            digests.append(xxhash.xxh3_64_intdigest(json_text(value).encode("ascii")) or 1)
        elif number in leaves.spread:
            digests.append(_NOTHING)
        else:
            state, data = xxhash.xxh3_64(), leaves.whole_of(number)
            for piece in host_blocks(data, 0, data.size):
                state.update(piece)
            digests.append(state.intdigest() or 1)
    return pack_checksums(digests)


def check_local(
    keys: Sequence[str], leaves: DescribedLeaves, digests: Sequence[bytes], below: Sequence[str] = ()
) -> None:
    """Compare what `local_digests` gave on each process.

    Raises:
        MismatchError: some leaf is not the same everywhere; leaves and processes are named.
    """
    numbers = _local(keys, leaves, below)
    if wrong := [process for process, found in enumerate(digests) if len(found) != _BYTES * len(numbers)]:
        raise MismatchError(f'{format_processes(wrong)} did not pass host_local="equal", as process 0 did')
    columns = list(map(unpack_checksums, digests))
    wanted = columns[0]
    differing: dict[int, list[int]] = {}
    for process, found in enumerate(columns[1:], 1):
        if found != wanted:
            for number, mine, theirs in zip(numbers, wanted, found, strict=True):
                if theirs not in (mine, _NOTHING):
                    differing.setdefault(number, []).append(process)
    if differing:
        lines = [f"leaf {keys[n]!r:.200} differs on {format_processes(differing[n])}" for n in sorted(differing)]
        what = "leaves that each process holds alone differ from those of process 0:"
        hint = _STATES_HINT if below else 'host_local="first" saves what process 0 has'
        raise _mismatch(what, lines, len(lines), hint)


def pack_share(numbers: Sequence[array[int]], digests: bytes) -> bytes:
    """Return what a process hands in, as bytes: some columns of numbers, and what `local_digests` gave.

    Example:
        >>> unpack_share(pack_share([array("Q", [7]), array("Q", [1, 2])], b"12345678"), 2)
        ([array('Q', [7]), array('Q', [1, 2])], b'12345678')
    """
    return b"".join([pack_checksums(array("Q", map(len, numbers))), *map(pack_checksums, numbers), digests])


def unpack_share(data: bytes, columns: int) -> tuple[list[array[int]], bytes]:
    """Return the columns and the digests that a process handed in."""
    at = _BYTES * columns
    numbers = []
    for count in unpack_checksums(data[:at]):
        numbers.append(unpack_checksums(data[at : at + _BYTES * count]))
        at += _BYTES * count
    return numbers, data[at:]


def _part(signature: bytes, leaf: int) -> bytes:
    return signature[_BYTES * leaf : _BYTES * leaf + _BYTES]


def _facts(kind: LeafType, held: HeldBoxes | None) -> bytes:
    return repr((kind.kind, kind.dtype, kind.shape, kind.impl, held)).encode()


def _leaf_digest(key: str, facts: bytes) -> int:
    return xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogatepass") + b"\0" + facts)


def _local(keys: Sequence[str], leaves: DescribedLeaves, below: Sequence[str]) -> list[int]:
    """Return the leaves that are process 0's, at or below some keys if there are any."""
    opaque = {number for number, kind in enumerate(leaves.leaf_types) if leaves.types[kind].kind == "opaque"}
    there = [n for n in range(len(leaves.leaf_types)) if n not in opaque and leaves.shared_by(n) is None]
    return [n for n in there if _is_below(below)(keys[n])] if below else there


def _is_below(above: Sequence[str]) -> Callable[[str], bool]:
    """Return what tells whether a key is one of some, or below it."""
    return lambda key: any(not one or f"{key}/".startswith(f"{one}/") for one in above)
