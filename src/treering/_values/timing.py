"""All waiting times of treering in one value: how often it looks, how long it stays, when it gives up."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

DEFAULT_TIMEOUT = 600.0
"""Seconds that a process waits for others if neither ``timeout=`` nor ``TREERING_TIMEOUT_S`` is given."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Waiting times in seconds, if nothing else is said.

    Example:
        >>> Timing(linger=0.3).poll_longest
        0.05
    """

    # The protocol of joint saves.
    poll_first: float = 0.001
    """The first pause between two looks for a message."""
    poll_longest: float = 0.05
    """The longest pause between two looks for a message."""
    poll_growth: float = 1.1
    """How many times longer each pause is than the one before: of a short wait at most a tenth is lost."""
    poll_longest_crowded: float = 0.2
    """The longest pause between two looks for a decision where 1,024 processes look."""
    poll_growth_crowded: float = 1.3
    """How many times longer each pause is than the one before where more than eight processes look."""
    fan_in: int = 32
    """How many processes hand in their votes to one; the same on all processes of a job."""
    fan_out: int = 256
    """Of how many processes messages lie in one folder; the same on all processes of a job."""
    linger: float = 5.0
    """How long the coordinator waits, at most, until all have read its decision."""
    put_retries: float = 1.0
    """How long a message that cannot be put is tried again."""
    put_pause: float = 0.01
    """The first pause between two tries; each is twice as long as the one before."""

    # Collectives and heartbeats.
    heartbeat_first: float = 1.0
    """When a process that waits puts its first heartbeat."""
    heartbeat_every: float = 1.25
    """How often it puts one afterwards; buckets may limit writes to one name to one a second."""
    heartbeat_look: float = 0.1
    """How often it looks at those of others once a collective has failed."""
    heartbeat_window: float = 10.0
    """How long before its deadline a process begins to compare the heartbeats of the others."""
    heartbeat_stale: float = 30.0
    """After how long without a new heartbeat ``doctor`` says that a process gives no sign; clocks may differ."""
    clock_step: float = 2.0
    """By how much the clock of a file system and that of the processes may differ, which are read in other steps."""
    after_error: float = 2.0
    """How long a process looks for heartbeats of the others once a collective has failed."""
    handshake_look: float = 30.0
    """How long a process looks for the folder of process 0: a network file system may hide a new name so long."""
    handshake_pause: float = 0.02
    """The pause between two such looks."""
    refresh: float = 1.0
    """How often a network file system is asked to forget that a name was not there."""

    # Local files.
    swap_pause: float = 0.001
    """The pause between two tries to lock a document that is to be compared and swapped."""
    swap_patience: float = 5.0
    """How long a swap of a small file waits for another one: whoever is at it may have been stopped."""

    # Loads.
    reopen_first: float = 0.02
    """The first pause before several processes open a tree again; each is twice as long as the one before."""
    reopen_longest: float = 2.0
    """The longest of these pauses."""

    # Leaves directories.
    directory_lock: float = 60.0
    """How long a save waits for the lock of a leaves directory."""
    directory_lock_first: float = 0.001
    """The first pause between two tries to take that lock."""
    directory_lock_longest: float = 0.05
    """The longest pause between two tries."""
    staged_folder: float = 10.0
    """How long a participant waits for the folder of an attempt that was announced."""
    staged_folder_pause: float = 0.02
    """The pause between two such looks."""

    # Runs and background saves.
    decide_longest: float = 1.0
    """How long at most until all processes of a run decide together again."""
    decide_share: float = 0.01
    """The same as a share of the interval between two saves, if that is shorter."""
    step_notes: float = 1.0
    """How often at most the notes on steps are written while saves wait in line."""
    removal_pause: float = 0.05
    """The pause between two looks whether removals have ended."""
    writer_pause: float = 0.5
    """How often a thread that waits for the writer wakes to see whether it lives."""
    watch_first: float = 1.0
    """The first pause between two looks for a new step of a run."""
    watch_longest: float = 15.0
    """The longest pause between two looks for a new step of a run."""
    watch_growth: float = 1.5
    """How many times longer each of these pauses is than the one before."""
    watch_together: float = 60.0
    """How long process 0 looks for a new step, at most, until it tells the others that there is none yet."""
    hold_pause: float = 0.05
    """The pause between two looks whether a step that is to be held is noted in ``run.json``."""
    hold_patience: float = 5.0
    """How long ``hold`` looks for that."""
    passing: float = 600.0
    """After how long a file that is in a run's folder for moments only was left by a dead process."""
    lease_share: float = 1 / 3
    """After which share of its time a lease is renewed."""

    # Progress bars.
    bar_first: float = 0.3
    """When a progress bar first appears."""
    bar_every: float = 0.1
    """How often it is drawn afterwards."""


current = Timing()
"""What all modules read at the moment of use; tests put another one here."""


def growing_pauses(first: float, longest: float) -> Iterator[float]:
    """Yield the seconds between one try and the next, each time twice as many."""
    while True:
        yield first
        first = min(2 * first, longest)
