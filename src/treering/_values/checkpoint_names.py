"""The names that treering gives to files of checkpoints and runs. No other file there is ever removed."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

INDEX = "treering.json"
"""The index; its being there is the commit."""

LOCK_FILE = ".treering.lock"
"""What stands for the lock of a folder where folders cannot be locked."""

LEFT_DOCUMENT = ".run.json.left"
"""The list of the steps that a save supersedes which goes back to an earlier one."""

ATTEMPT = re.compile(r"[0-9a-f]{16}")
"""The name of an attempt: different for each save."""

_JOURNAL = re.compile(r"\.treering\.json\.([0-9a-f]{16})\.treering-tmp")
_TOMBSTONE = re.compile(r"\.treering\.json\.([0-9a-f]{16})\.removed")
_DATA = re.compile(r"data-([0-9a-f]{16})-\d{5,}-of-\d{5,}\.safetensors")
# What the processes of a job write to each other, and what becomes such a message by being renamed.
_MESSAGE = re.compile(
    r"\.treering-(?:(?P<attempt>[0-9a-f]{16})-(?:(?:here|part|sum|left)-(?P<process>\d{5,})|signature|verdict)"
    r"|(?P<job>[0-9a-f]{16})-begin|waiting-\d{5,})"
    r"(?:\.[0-9a-f]{16}\.new)?"
)
# A first ``.run.json.left`` before it gets that name by a link.
_UNNAMED = re.compile(re.escape(LEFT_DOCUMENT) + r"\.[0-9a-f]{16}\.new")
_MESSAGE_FOLDER = re.compile(r"\.treering-([0-9a-f]{16})-messages-\d{5,}")


def journal_of(attempt: str) -> str:
    """Return the name of the journal of an attempt: its index before it is the index.

    Example:
        >>> journal_of("0123456789abcdef")
        '.treering.json.0123456789abcdef.treering-tmp'
    """
    return f".{INDEX}.{attempt}.treering-tmp"


def attempt_of_journal(name: str) -> str | None:
    """Return the attempt whose journal has this name; None for any other name.

    Example:
        >>> attempt_of_journal(".treering.json.0123456789abcdef.treering-tmp")
        '0123456789abcdef'
    """
    found = _JOURNAL.fullmatch(name)
    return found[1] if found else None


def tombstone_of(attempt: str) -> str:
    """Return the name that the index of an attempt gets when its checkpoint is removed; what it lists may go.

    Example:
        >>> tombstone_of("0123456789abcdef")
        '.treering.json.0123456789abcdef.removed'
    """
    return f".{INDEX}.{attempt}.removed"


def attempt_of_tombstone(name: str) -> str | None:
    """Return the attempt whose removed index has this name; None for any other name.

    Example:
        >>> attempt_of_tombstone(".treering.json.0123456789abcdef.removed")
        '0123456789abcdef'
    """
    found = _TOMBSTONE.fullmatch(name)
    return found[1] if found else None


def is_data(name: str) -> bool:
    """Whether a data file of a checkpoint could have this name.

    Example:
        >>> is_data("data-0123456789abcdef-00000-of-00001.safetensors"), is_data("model.safetensors")
        (True, False)
    """
    return _DATA.fullmatch(name) is not None


def process_of_data(name: str) -> int | None:
    """Return the process whose data file has this name; None for any other name.

    Example:
        >>> process_of_data("data-0123456789abcdef-00003-of-00004.safetensors")
        3
    """
    return int(name.rsplit("-", 3)[1]) if is_data(name) else None


def data_of(attempt: str, names: Iterable[str]) -> list[str]:
    """Return the names that are data files of an attempt.

    Example:
        >>> data_of("0123456789abcdef", ["data-0123456789abcdef-00000-of-00001.safetensors", "config.json"])
        ['data-0123456789abcdef-00000-of-00001.safetensors']
    """
    return [name for name in names if (found := _DATA.fullmatch(name)) and found[1] == attempt]


def require_data_name(attempt: str, name: str) -> None:
    """Refuse a name that is not one of a data file of the attempt.

    Raises:
        ValueError: it is none.
    """
    if not data_of(attempt, [name]):
        raise ValueError(f"{name!r} is not a data file of attempt {attempt}")


def prepare_name(job: str) -> str:
    """Return the name of the note that says which joint save of a job is on.

    Example:
        >>> prepare_name("0123456789abcdef")
        '.treering-0123456789abcdef-begin'
    """
    return f".treering-{job}-begin"


def signature_name(attempt: str) -> str:
    """Return the name of the message with what process 0 saves, where the prepare message does not hold it.

    Example:
        >>> signature_name("0123456789abcdef")
        '.treering-0123456789abcdef-signature'
    """
    return f".treering-{attempt}-signature"


def arrival_name(attempt: str, process: int) -> str:
    """Return the name of the message in which one process says that it takes part in an attempt.

    Example:
        >>> arrival_name("0123456789abcdef", 3)
        '.treering-0123456789abcdef-here-00003'
    """
    return f".treering-{attempt}-here-{process:05d}"


def vote_name(attempt: str, process: int) -> str:
    """Return the name of the message in which one process votes, or says why it failed.

    Example:
        >>> vote_name("0123456789abcdef", 3)
        '.treering-0123456789abcdef-part-00003'
    """
    return f".treering-{attempt}-part-{process:05d}"


def sum_name(attempt: str, process: int) -> str:
    """Return the name of the message in which one process hands on its vote and those that it has collected.

    Example:
        >>> sum_name("0123456789abcdef", 3)
        '.treering-0123456789abcdef-sum-00003'
    """
    return f".treering-{attempt}-sum-{process:05d}"


def departure_name(attempt: str, process: int) -> str:
    """Return the name of the message in which one process says that it touches nothing of an attempt any more.

    Example:
        >>> departure_name("0123456789abcdef", 3)
        '.treering-0123456789abcdef-left-00003'
    """
    return f".treering-{attempt}-left-{process:05d}"


def decision_name(attempt: str) -> str:
    """Return the name of the message in which process 0 says what became of an attempt.

    Example:
        >>> decision_name("0123456789abcdef")
        '.treering-0123456789abcdef-verdict'
    """
    return f".treering-{attempt}-verdict"


def heartbeat_name(process: int) -> str:
    """Return the name of the message by which a process shows that it lives, while it waits for others.

    Example:
        >>> heartbeat_name(3)
        '.treering-waiting-00003'
    """
    return f".treering-waiting-{process:05d}"


def folder_of_message(name: str, fan_out: int) -> str | None:
    """Return the name of the folder that a message lies in; None for the checkpoint's own.

    Args:
        name: the name of the message.
        fan_out: of how many processes messages lie in one folder; those of the first lie in the checkpoint's own.

    Example:
        >>> folder_of_message(vote_name("0123456789abcdef", 300), 256)
        '.treering-0123456789abcdef-messages-00001'
        >>> folder_of_message(vote_name("0123456789abcdef", 255), 256) is None
        True
    """
    found = _MESSAGE.fullmatch(name)
    group = int(found["process"]) // fan_out if found and found["process"] else 0
    return f".treering-{found['attempt']}-messages-{group:05d}" if found and group else None


def is_message_folder(name: str) -> bool:
    """Whether a folder of messages could have this name.

    Example:
        >>> is_message_folder(".treering-0123456789abcdef-messages-00001")
        True
    """
    return _MESSAGE_FOLDER.fullmatch(name) is not None


def is_message(name: str) -> bool:
    """Whether a message, or one that is being written, could have this name.

    Example:
        >>> is_message(".treering-waiting-00003"), is_message(".treering-notes")
        (True, False)
    """
    return _MESSAGE.fullmatch(name) is not None


def is_passing(name: str) -> bool:
    """Whether a file of this name is in the folder of a run for moments only: a message, or a document without a name.

    Example:
        >>> is_passing(".run.json.left.0123456789abcdef.new"), is_passing("run.json")
        (True, False)
    """
    return is_message(name) or _UNNAMED.fullmatch(name) is not None


def is_prepare(name: str) -> bool:
    """Whether this is the name of the message of a job, whose content names the attempt.

    Example:
        >>> is_prepare(prepare_name("0123456789abcdef")), is_prepare(heartbeat_name(3))
        (True, False)
    """
    found = _MESSAGE.fullmatch(name)
    return found is not None and found["job"] is not None


def attempt_of_message(name: str) -> str | None:
    """Return the attempt that the name of a message, or of a folder of messages, tells; None for any other name.

    Example:
        >>> attempt_of_message(vote_name("0123456789abcdef", 3))
        '0123456789abcdef'
        >>> attempt_of_message(prepare_name("0123456789abcdef")) is None
        True
    """
    found = _MESSAGE.fullmatch(name) or _MESSAGE_FOLDER.fullmatch(name)
    return found[1] if found else None


# ---------------------------------------------------------------------------------------------------------- of a run

RUN_DOCUMENT = "run.json"
"""The document about all steps of a run."""

LEASES = ".leases"
"""The folder of a run with the leases on its steps."""

HANDED_DOCUMENT = ".run.json.handed"
"""The document that says which steps of a run were handed to ``on_commit``."""

RESUMED_DOCUMENT = ".run.json.resumed"
"""Which steps were passed over when the run was resumed, and how often it was resumed from one."""

HIGHEST_STEP = 2**63 - 1
"""Steps are counted from 0 to here."""

_LEASE = re.compile(r"step_(0|[1-9][0-9]{0,18})-([1-9][0-9]{0,4})-[0-9a-f]{16}")

# Eight digits, and more only where eight are not enough: each step has one name.
_STEP = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,18})")


def step_name(step: int) -> str:
    """Return the name of a step's folder.

    Example:
        >>> step_name(1200), step_name(123456789)
        ('step_00001200', 'step_123456789')
    """
    return f"step_{step:08d}"


@functools.lru_cache(maxsize=1 << 14)  # each save asks for the names of thousands of steps again
def step_of_name(name: str) -> int | None:
    """Return the step whose folder has this name; None for any other name.

    Example:
        >>> step_of_name("step_00001200"), step_of_name("step_1200"), step_of_name("step_" + "9" * 100)
        (1200, None, None)
    """
    found = _STEP.fullmatch(name)
    step = int(found[1]) if found else None
    return step if step is not None and step <= HIGHEST_STEP else None


def lease_name(step: int, seconds: int, digits: str) -> str:
    """Return the name of a lease on a step, which says for how many seconds it counts after it was written.

    Example:
        >>> lease_name(1200, 60, "0123456789abcdef")
        'step_1200-60-0123456789abcdef'
    """
    return f"step_{step}-{seconds}-{digits}"


def lease_of_name(name: str) -> tuple[int, int] | None:
    """Return the step and the seconds of the lease that has this name; None for any other name.

    Example:
        >>> lease_of_name("step_1200-60-0123456789abcdef"), lease_of_name("step_00001200")
        ((1200, 60), None)
    """
    found = _LEASE.fullmatch(name)
    return (int(found[1]), int(found[2])) if found and int(found[1]) <= HIGHEST_STEP else None
