"""One driver for joint saves of every form: each process writes its share, process 0 commits what all have written.

The protocol is that of ``treering._coordination``; ``docs/design/processes.md`` says why each step is where it is. What
a form adds is a `JointShare`.

Before that each process says a few bytes of each leaf of its tree, and of what it holds alone. Leaves are compared by
key, kind, dtype, shape and by who holds which box; what they hold is not. A leaf that a process holds alone is taken
from process 0, whatever the others have in its place, so how it is cut there says nothing.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import xxhash

from treering._arrays.host import host_blocks
from treering._arrays.outgoing import DescribedLeaves, HeldBoxes
from treering._checkpoint.save_options import require_value
from treering._checkpoint.transaction import JoinedFolder, refusing_board
from treering._codec.documents import json_text
from treering._coordination.job_handshake import leave_note, release, remove_told, renumber
from treering._coordination.message_board import MessageBoard
from treering._coordination.operations import Call, Participant, Renumbered, run_protocol
from treering._coordination.two_phase_commit import coordinate, participate, refuse, withdraw
from treering._format.index import Container, LeafType
from treering._format.leaf_values import encode_value
from treering._tree.flatten import Flattened
from treering._values.boxes import text_of
from treering._values.checksums import pack_checksums, unpack_checksums
from treering._values.human import build_mismatch, join_first, pluralize
from treering._values.keys import quoted_key
from treering._values.processes import format_processes
from treering.errors import MismatchError, TreeringError

S = TypeVar("S", bound="JointShare")
T = TypeVar("T")


class JointShare(Participant):
    """The share of one process in a joint save: what it writes, and what process 0 does with the shares of all.

    Args:
        call: the save.
        flat: the tree.
        leaves: its leaves.
        compares_local: whether leaves that each process holds alone are compared.
        states: the keys at or below which such leaves always are.
    """

    def __init__(
        self, call: Call, flat: Flattened, leaves: DescribedLeaves, *, compares_local: bool, states: Sequence[str] = ()
    ) -> None:
        self._call = call
        self._flat = flat
        self._leaves = leaves
        self._compares_local = compares_local
        self._states = states

    @abc.abstractmethod
    def plan(self) -> None:
        """Plan anew what this process writes: its leaves turned out to be others."""

    def signature(self) -> bytes:
        """Return what all processes must have in common; asked of process 0."""
        return signature_of(self._flat, self._leaves)

    def check(self, signature: bytes) -> None:
        """Compare with the signature of process 0.

        Raises:
            MismatchError: this process is saving something else.
        """
        leaves = match_signature(self._flat, self._leaves, signature, self._call.processes.this, self._states)
        if leaves is not self._leaves:
            self._leaves = leaves
            self.plan()

    @abc.abstractmethod
    def enter(self, held: contextlib.ExitStack) -> MessageBoard:
        """Begin the save as process 0, and return the message board there; ``held`` ends the save."""

    @abc.abstractmethod
    def join(self, folder: JoinedFolder, held: contextlib.ExitStack) -> None:
        """Enter the save that process 0 has begun, as any other process; ``held`` leaves it."""

    def finish(self) -> None:
        """Do what follows the agreement, before the save is left."""

    def hand_in(self, *numbers: array[int]) -> bytes:
        """Return columns of numbers, and digests of the leaves that are compared, as bytes."""
        digests = local_digests(self._flat, self._leaves, self._states) if self._compares_local else b""
        return pack_share(numbers, digests)

    def handed_in(self, payloads: Sequence[bytes], columns: int) -> list[list[array[int]]]:
        """Return the columns that each process handed in, once the leaves that are compared are the same everywhere.

        Raises:
            MismatchError: they are not, or only some processes asked for that.
        """
        found = [unpack_share(payload, columns) for payload in payloads]
        digests = [each for _, each in found]
        if self._compares_local:
            check_local(self._flat.keys, self._leaves, digests, self._states)
        elif strict := [process for process, each in enumerate(digests) if each]:
            raise MismatchError(f'{format_processes(strict)} passed host_local="equal", and process 0 did not')
        return [numbers for numbers, _ in found]


def save_jointly(
    call: Call, path: Path, make_share: Callable[[Call], S], *, pause: Callable[[float], None] = time.sleep
) -> S | None:
    """Do the part of this process in a counted save, on any thread; it talks to the others through the folder alone.

    Args:
        call: the save.
        path: the folder.
        make_share: returns the share of this process in the save that it is given, which is ``call`` as it is counted
            in the end. What it raises is told to the others first.
        pause: sleeps while others are waited for.

    Returns:
        The share of process 0, once the save has ended; None on every other process.
    """
    tells_others = False

    def begin() -> None:
        nonlocal tells_others
        tells_others = True
        release(call)

    share, number = None, call.number
    try:
        with leave_note(call, path, pause) as sleep:
            try:
                if call.processes.is_coordinator:
                    with contextlib.ExitStack() as held, held:  # left twice, so that an interrupt cannot keep a lock
                        share = make_share(call)
                        signature = share.signature()
                        protocol, board = coordinate(call, signature), share.enter(held)
                        run_protocol(protocol, board, share, begin=begin, sleep=sleep)
                        share.finish()
                else:
                    _participate(call, path, make_share, begin, sleep)
            except Renumbered as counted:
                number = counted.number
    except BaseException as error:  # an interrupt too: the others would wait in vain; raised again below
        if not tells_others:
            release(call)
            tell_of_end(path, call, error)
        raise
    if number != call.number:
        return save_jointly(renumber(call, number), path, make_share, pause=pause)
    remove_told(call.processes)
    return share


def _participate(
    call: Call,
    path: Path,
    make_share: Callable[[Call], JointShare],
    begin: Callable[[], None],
    pause: Callable[[float], None],
) -> None:
    share: JointShare | Exception
    try:
        share = make_share(call)
    except Exception as error:  # noqa: BLE001 - raised when the others can be told
        share = error
    with contextlib.ExitStack() as held:
        folder = held.enter_context(JoinedFolder(path, call.attempt))
        executor = _ShareExecutor(share, lambda joined: joined.join(folder, held))
        protocol = participate(call, executor.check)
        run_protocol(protocol, folder.board, executor, make=folder.make, begin=begin, sleep=pause)
        executor.share().finish()


def tell_of_end(path: Path, call: Call, error: BaseException) -> None:
    """Tell the others of a counted save what ended it here before it began; they are not waited for.

    A second interrupt ends this as well.
    """
    with contextlib.suppress(TreeringError, OSError):
        if call.processes.is_coordinator:
            with refusing_board(path) as board:
                run_protocol(refuse(call, error), board, _ShareExecutor(error))
        else:
            with contextlib.closing(JoinedFolder(path, call.attempt)) as folder:
                run_protocol(withdraw(call, error), folder.board, _ShareExecutor(error), make=folder.make)


class _ShareExecutor:
    """Does what the protocol asks of a share; where there is none, it raises why.

    Args:
        share: the share, or why there is none.
        join: enters the save before the share is written.
    """

    def __init__(self, share: JointShare | BaseException, join: Callable[[JointShare], None] = lambda _: None) -> None:
        self._share = share
        self._join = join

    def share(self) -> JointShare:
        return require_value(self._share)

    def check(self, signature: bytes) -> None:
        self.share().check(signature)

    def prepare(self) -> bytes:
        share = self.share()
        self._join(share)
        return share.prepare()

    def commit(self, payloads: Sequence[bytes]) -> None:
        raise RuntimeError(f"process 0 commits the shares of all {len(payloads)}")

    def roll_back(self) -> None:
        if not isinstance(self._share, BaseException):
            self._share.roll_back()


# -------------------------------------------------------------------------------------------- what trees have in common


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
    text = "leaf {} differs from that of process 0; here it is {}"
    lines = [text.format(quoted_key(keys[n]), leaf_text(leaves, n)) for n in differing[:_SHOWN]]
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
        lines = [f"leaf {quoted_key(keys[n])} differs on {format_processes(differing[n])}" for n in sorted(differing)]
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
