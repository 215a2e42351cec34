"""A reader of runs, written from docs/spec/run.md alone: with json and xxhash, and nothing of treering."""

import datetime
import json
import re
from pathlib import Path
from typing import Any

import xxhash

NUMBERS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def signed(data: bytes, member: str) -> dict[str, Any]:
    """Return a document whose first line holds the digest of every other byte."""
    first = re.match(rb'\{"%s": 1, "digest": "(xxh3-128:[0-9a-f]{32})",\n' % member.encode(), data)
    assert first, f"no first line: {data[:100]!r}"
    digest = xxhash.xxh3_128(data[: first.start(1)] + data[first.end(1) :]).hexdigest()
    assert first[1] == f"xxh3-128:{digest}".encode(), "another digest"
    return json.loads(data)


def step_of(name: str) -> int | None:
    """Return the step of that name."""
    found = re.fullmatch(r"step_([0-9]{8}|[1-9][0-9]{8,18})", name, re.ASCII)
    return int(found[1]) if found and int(found[1]) < 2**63 else None


def indexes(run: Path) -> dict[int, Path]:
    """Return the steps that are there, each with its index."""
    found = {}
    for folder in run.iterdir():
        step, index = step_of(folder.name), folder / "treering.json"
        if (
            step is not None
            and not folder.is_symlink()
            and folder.is_dir()
            and index.is_file()
            and not index.is_symlink()
        ):
            found[step] = index
    return {step: index for step, index in sorted(found.items()) if step not in left(run, found)}


def left(run: Path, there: dict[int, Path]) -> set[int]:
    """Return the steps that a save has left behind which went back to an earlier one."""
    try:
        listed = signed((run / ".run.json.left").read_bytes(), "treering_left")
        note = signed(there[listed["step"]].read_bytes(), "treering")["metadata"].get("treering")
    except (AssertionError, FileNotFoundError, KeyError):
        return set()
    if not isinstance(note, dict) or note.get("mark") != listed["mark"]:
        return set()
    return {each["step"] for each in listed["left"] if attempt(there.get(each["step"])) == (each["attempt"],)}


def passed(run: Path) -> set[int]:
    """Return the steps that a resume has passed over, which no policy may see."""
    try:
        listed = signed((run / ".run.json.resumed").read_bytes(), "treering_resumed")
    except FileNotFoundError:
        return set()
    there = indexes(run)
    return {each["step"] for each in listed["passed"] if attempt(there.get(each["step"])) == (each["attempt"],)}


def attempt(index: Path | None) -> tuple[str | None, ...]:
    """Return the attempt of an index, None where it cannot be read, and nothing where there is none."""
    try:
        return (signed(index.read_bytes(), "treering")["attempt"],) if index else ()
    except AssertionError:
        return (None,)


def seconds(text: str) -> float:
    """Return a time as POSIX seconds."""
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", text, re.ASCII)
    return datetime.datetime.fromisoformat(text).timestamp()


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Return metrics, with the numbers that JSON has none for."""
    return {name: NUMBERS[value] if isinstance(value, str) else float(value) for name, value in metrics.items()}


def of_note(index: Path) -> tuple[Any, ...]:
    """Return what a step's own note says: time, metrics, temporary, bytes."""
    data = index.read_bytes()
    document = signed(data, "treering")
    nbytes = sum(file["nbytes"] for file in document["files"]) + len(data)
    note = document["metadata"].get("treering")
    if not isinstance(note, dict):
        return index.stat().st_mtime, {}, False, nbytes
    return seconds(note["saved"]), numbers(note["metrics"]), note["temporary"], nbytes


def of_cache(run: Path) -> dict[int, tuple[Any, ...]]:
    """Return what run.json says of the steps of which it may be believed."""
    found = {}
    there = indexes(run)
    for step in signed((run / "run.json").read_bytes(), "treering_run")["steps"]:
        index = there.get(step["step"])
        if index is not None:
            data = index.read_bytes()
            if len(data) == step["index_nbytes"] and json.loads(data)["digest"] == step["index_digest"]:
                facts = seconds(step["saved"]), numbers(step["metrics"]), step["temporary"], step["nbytes"]
                found[step["step"]] = facts
    return found


def removable(folder: Path) -> dict[str, set[str]]:
    """Return the tombstones in a step's folder, each with the files there that it proves may go."""
    index = folder / "treering.json"
    live = listed(index.read_bytes()) if index.exists() else set()
    stones = (path for path in folder.iterdir() if re.fullmatch(r"\.treering\.json\.[0-9a-f]{16}\.removed", path.name))
    there = {path.name for path in folder.iterdir()}
    return {stone.name: (listed(stone.read_bytes()) - live) & there for stone in stones}


def listed(index: bytes) -> set[str]:
    """Return the data files that an index lists."""
    document = signed(index, "treering")
    names = {*(file["name"] for file in document["files"]), *document["replaces"]}
    return {name for name in names if re.fullmatch(r"data-[0-9a-f]{16}-\d{5,}-of-\d{5,}\.safetensors", name, re.ASCII)}
