"""One driver for joint saves of every form: each process writes its share, process 0 commits what all have written.

The protocol is that of ``treering._coordination``; ``docs/design/processes.md`` says why each step is where it is. What
a form adds is a `JointShare`.
"""

from __future__ import annotations

import abc
import contextlib
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from treering._arrays.outgoing import DescribedLeaves
from treering._checkpoint.save_options import require_value
from treering._checkpoint.signature import (
    check_local,
    local_digests,
    match_signature,
    pack_share,
    signature_of,
    unpack_share,
)
from treering._checkpoint.transaction import JoinedFolder, refusing_board
from treering._coordination.job_handshake import leave_note, release, remove_told, renumber
from treering._coordination.message_board import MessageBoard
from treering._coordination.operations import Call, Participant, Renumbered, run_protocol
from treering._coordination.two_phase_commit import coordinate, participate, refuse, withdraw
from treering._tree.flatten import Flattened
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
                    share = _coordinate(call, make_share, begin, sleep)
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


def _coordinate(
    call: Call, make_share: Callable[[Call], S], begin: Callable[[], None], pause: Callable[[float], None]
) -> S:
    with contextlib.ExitStack() as held, held:  # left twice, so that an interrupt cannot keep a lock
        share = make_share(call)
        signature = share.signature()
        board = share.enter(held)
        run_protocol(coordinate(call, signature), board, share, begin=begin, sleep=pause)
        share.finish()
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
