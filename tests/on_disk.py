"""What docs/spec says of names, digests, messages and notes, for tests that look at files or make some by hand."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

INDEX = "treering.json"
RUN_DOCUMENT = "run.json"
LEFT_DOCUMENT = ".run.json.left"
_MESSAGE = re.compile(
    r"\.treering-([0-9a-f]{16}-((here|part|sum|left)-\d{5,}|signature|verdict|begin)|waiting-\d{5,})"
    r"(\.[0-9a-f]{16}\.new)?"
)


def digest(*parts: bytes) -> str:
    """Return the digest of bytes as it stands in first lines."""
    return f"xxh3-128:{xxhash.xxh3_128_hexdigest(b''.join(parts))}"


def signed(name: str, body: str, version: str = "1") -> bytes:
    """Return a document of that name with a first line in front of its members, a text that begins behind it."""
    head = f'{{"{name}": {version}, "digest": "'
    rest = f'",\n{body}'
    return f"{head}{digest(head.encode(), rest.encode())}{rest}".encode()


def signed_again(data: bytes) -> bytes:
    """Return a document that was changed with the digest that fits it now."""
    before, _, rest = data.partition(b"xxh3-128:")
    return before + digest(before, rest[32:]).encode() + rest[32:]


def block_checksums(data: bytes, block: int = 1 << 16) -> list[int]:
    """Return the checksum of each block."""
    return [xxhash.xxh3_64_intdigest(data[start : start + block]) for start in range(0, len(data), block)]


# ---------------------------------------------------------------------------------------------- files of a checkpoint


def is_message(name: str) -> bool:
    """Whether this is the name of a message between processes."""
    return _MESSAGE.fullmatch(name) is not None


def attempt_of_journal(name: str) -> str | None:
    """Return the attempt of the index that waits for its commit under this name; None where it is another file."""
    found = re.fullmatch(r"\.treering\.json\.([0-9a-f]{16})\.treering-tmp", name)
    return found and found[1]


def is_data_of(attempt: str, name: str) -> bool:
    """Whether this is the name of a data file of an attempt."""
    return re.fullmatch(rf"data-{attempt}-\d{{5,}}-of-\d{{5,}}\.safetensors", name) is not None


def heartbeat_name(process: int) -> str:
    """Return the name of the message by which a process shows that it waits."""
    return f".treering-waiting-{process:05}"


def prepare_name(job: str) -> str:
    """Return the name of the message by which process 0 begins a save."""
    return f".treering-{job}-begin"


def vote_name(attempt: str, process: int) -> str:
    """Return the name of the message in which a process votes."""
    return f".treering-{attempt}-part-{process:05}"


def decision_name(attempt: str) -> str:
    """Return the name of the message in which process 0 decides."""
    return f".treering-{attempt}-verdict"


def tombstone_name(attempt: str) -> str:
    """Return the name that the index of a checkpoint has while the checkpoint is being removed."""
    return f".treering.json.{attempt}.removed"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder as a process that saves into it does."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


# -------------------------------------------------------------------------------------------------------------- steps


def step_path(run: Path, step: int) -> Path:
    """Return the folder of a step."""
    return run / f"step_{step:08}"


def attempt_of(folder: Path) -> str:
    """Return the attempt of a checkpoint."""
    return str(json.loads((folder / INDEX).read_bytes())["attempt"])


def with_note(
    metadata: Mapping[str, Any],
    *,
    step: int,
    saved: float,
    metrics: Mapping[str, float] | None = None,
    temporary: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Return the metadata of a step: the note that a run writes, and a user's members."""
    at = datetime.datetime.fromtimestamp(saved, datetime.UTC)
    texts = {"nan", "inf", "-inf"}
    note = {
        "step": step,
        "saved": at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "metrics": {
            name: str(float(value)) if str(float(value)) in texts else value for name, value in (metrics or {}).items()
        },
        "temporary": temporary,
        "branch": None,
    }
    return {"treering": note | more, **metadata}


def note_step(run: Path, step: int, *, keep: str | None = None, seconds: float | None = None) -> None:
    """Write a step into ``run.json``, with what its index says."""
    path = run / RUN_DOCUMENT
    steps = {each["step"]: each for each in json.loads(path.read_bytes())["steps"]} if path.exists() else {}
    data = (step_path(run, step) / INDEX).read_bytes()
    index = json.loads(data)
    note = index["metadata"]["treering"]
    steps[step] = {
        "step": step,
        "attempt": index["attempt"],
        **{name: note[name] for name in ("saved", "metrics", "temporary")},
        "nbytes": len(data) + sum(file["nbytes"] for file in index["files"]),
        "seconds": seconds,
        "index_nbytes": len(data),
        "index_digest": index["digest"],
    }
    members = {"keep": keep, "save_every": None, "steps": [steps[number] for number in sorted(steps)]}
    path.write_bytes(signed("treering_run", json.dumps(members)[1:]))
