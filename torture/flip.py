"""Bit rot: one bit of a checkpoint, leaves directory or npz archive is flipped.

``load`` and ``verify`` see it, or nothing has changed.
"""

from __future__ import annotations

import collections
import dataclasses
import multiprocessing
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import treering
from torture.scenes import fingerprint
from treering._format.document import parse_index
from treering.errors import TreeringError
from treering.leaves import tree_serialize_leaves

__all__ = ["SUBJECTS", "Bit", "Subject", "Tally", "every_bit", "flip", "flipped", "look", "random_bits"]

_METADATA = {"run": "torture", "loss": 0.25}
ARCHIVE = "a.npz"
"""The name of an archive in its folder."""
_LARGE_BYTES = 3_000_000
_INDEXES = frozenset({"treering.json", "tensorstore_index.json"})


class Bit(NamedTuple):
    """One bit of what was saved."""

    file: str
    """Name of the file, below the folder."""
    byte: int
    """Position in it."""
    bit: int
    """0 to 7."""


@dataclasses.dataclass(slots=True)
class Tally:
    """What became of the flips."""

    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """How many, by file and outcome."""
    violations: list[str] = dataclasses.field(default_factory=list)
    """What must not be."""

    def add(self, other: Tally) -> None:
        """Take over what another process found."""
        self.outcomes += other.outcomes
        self.violations += other.violations


class Pair(NamedTuple):
    """A container that files only know by name."""

    left: Any
    """Anything."""
    right: Any
    """Anything."""


def small() -> dict[Any, Any]:
    """Return a state of some hundred bytes with a leaf of every kind."""
    arrays = {name: np.arange(5).astype(getattr(ml_dtypes, name, name)) for name in ("float32", "bfloat16", "int4")}
    odd = {
        "bool": np.array([True, False]),
        "complex": np.array([1j], np.complex64),
        "empty": np.zeros((0, 3)),
        "0-d": np.array(7),
    }
    python: list[Any] = [None, True, -3, 1 << 70, 0.1, float("nan"), 2j, "größe", b"\0\xff", "\ud800"]
    return {"params": arrays, "odd": odd, "python": python, 3: (np.float64(0.5), Pair([], {})), "a/b~c": [1]}


def large() -> dict[Any, Any]:
    """Return a state of some megabytes; one array lies in parts on all devices."""
    import jax

    noise = np.random.default_rng(0)
    whole = noise.integers(0, 256, _LARGE_BYTES, np.uint8)
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    parts = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    sharded = jax.device_put(noise.normal(size=(64, 999)).astype(np.float32), parts)
    layers = [noise.normal(size=(7, 11)).astype(np.float32) for _ in range(300)]
    return {"whole": whole, "sharded": sharded, "layers": layers}


def large_packed() -> dict[str, Any]:
    """Return a state of so many leaves that its index has packed columns; an array in parts and values among them."""
    layers = {f"layer {n}": {"w": np.full(3, n, np.int16) if n % 8 == 0 else None, "n": n} for n in range(2100)}
    return {"layers": layers, "sharded": large()["sharded"]}


def small_leaves() -> dict[str, Any]:
    """Return what is in a leaves directory of some hundred bytes: a tree without prefix, two prefixes."""
    plain = {"step": 7, "bias": np.arange(5).astype(ml_dtypes.bfloat16), "name": None}
    model = {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "empty": np.zeros((0, 2)), "a.b": np.array(7)}
    # As an index lists them: prefixes first.
    return {"model": model, "ema": {"kernel": np.arange(40, dtype=np.int16) % 3, "lr": 0.5}, **plain}


def large_leaves() -> dict[str, Any]:
    """Return what is in a larger one: large files, many small ones, chunks, compressed ones."""
    state = large()
    return {"model": {"sharded": state["sharded"]}, "ema": {"layers": state["layers"][:100]}, "whole": state["whole"]}


def arrays() -> dict[str, Any]:
    """Return what numpy stores in an archive of some hundred bytes: each order of bytes and axes, and no items."""
    rows = np.arange(6.0).reshape(2, 3)
    return {"rows": rows, "columns": np.asfortranarray(rows), "none": np.zeros((0, 3)), "große/0": np.array(3 + 4j)}


def _save_stored(path: Path, state: Any) -> None:
    path.mkdir()
    np.savez(path / ARCHIVE, **state)


def _save_deflated(path: Path, state: Any) -> None:
    path.mkdir()
    np.savez_compressed(path / ARCHIVE, **state)


def _save_checkpoint(path: Path, state: Any) -> None:
    treering.save(path, state, metadata=_METADATA)


def _save_leaves(path: Path, state: Any) -> None:
    """Save the branches of a state as prefixes; one of them compressed."""
    state = dict(state)
    model, ema = state.pop("model"), state.pop("ema")
    tree_serialize_leaves(path, state)
    tree_serialize_leaves(path, model, prefix="model")
    tree_serialize_leaves(path, ema, prefix="ema", compressor={"id": "zstd", "level": 1})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Something saved, of which bits are flipped."""

    state: Callable[[], Any]
    """What is saved, and has to come back."""
    save: Callable[[Path, Any], None]
    """Saves it."""
    metadata: dict[str, Any]
    """What has to be found beside it."""
    file: str = ""
    """The name of what is loaded in the folder that is saved; empty for the folder itself."""


def _checkpoint(state: Callable[[], Any]) -> Subject:
    return Subject(state=state, save=_save_checkpoint, metadata=_METADATA)


def _leaves(state: Callable[[], Any]) -> Subject:
    return Subject(state=state, save=_save_leaves, metadata={})


def _archive(save: Callable[[Path, Any], None]) -> Subject:
    return Subject(state=arrays, save=save, metadata={}, file=ARCHIVE)


SUBJECTS = {
    "small checkpoint": _checkpoint(small),
    "large checkpoint": _checkpoint(large),
    "large packed checkpoint": _checkpoint(large_packed),
    "small leaves directory": _leaves(small_leaves),
    "large leaves directory": _leaves(large_leaves),
    "small npz": _archive(_save_stored),
    "small deflated npz": _archive(_save_deflated),
}
"""Of the small ones every bit is flipped, of the large ones random bits."""


def flip(processes: int, stride: int, count: int, seed: int) -> int:
    """Flip every ``stride``-th bit of what is small, ``count`` random bits of what is larger, and tell.

    Returns:
        The exit code: 1 when something was wrong.
    """
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="treering-flip-") as folder:
        for name, subject in SUBJECTS.items():
            path = Path(folder, name.replace(" ", "-"))
            subject.save(path, subject.state())
            bits = every_bit(path, stride) if name.startswith("small") else random_bits(path, count, seed)
            if bits:
                wrong += _shared_out(name, path, bits, processes)
    return 1 if wrong else 0


def _shared_out(name: str, path: Path, bits: Sequence[Bit], processes: int) -> int:
    """Let fresh processes flip, each in a copy of its own; print and return the number of violations."""
    start = time.monotonic()
    copies = [path.with_name(f"{path.name}-{number}") for number in range(processes)]
    for copy in copies:
        shutil.copytree(path, copy)
    tally = Tally()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        jobs = [(name, copy, bits[number::processes]) for number, copy in enumerate(copies)]
        for other in pool.starmap(flipped, jobs, chunksize=1):
            tally.add(other)
    nbytes = sum(file.stat().st_size for file in _files(path).values())
    seconds = time.monotonic() - start
    print(f"{name} of {nbytes:,} bytes: {len(bits):,} bits flipped, one at a time, in {seconds:.0f} s")
    for outcome, number in sorted(tally.outcomes.items()):
        print(f"  {number:,} in the {outcome}")
    print(f"  {len(tally.violations)} violations")
    for line in tally.violations[:50]:
        print(f"    {line}")
    return len(tally.violations)


def _files(path: Path) -> dict[str, Path]:
    """Return the files that a reader needs, by their names below ``path``: not the copies that a save keeps."""
    found = {str(file.relative_to(path)): file for file in sorted(path.rglob("*")) if file.is_file()}
    return {name: file for name, file in found.items() if not name.startswith(".treering/")}


def every_bit(path: Path, stride: int) -> list[Bit]:
    """Return every bit of what was saved, or every ``stride``-th."""
    sizes = {name: file.stat().st_size for name, file in _files(path).items()}
    return [Bit(name, at // 8, at % 8) for name, size in sizes.items() for at in range(0, 8 * size, stride)]


def random_bits(path: Path, count: int, seed: int) -> list[Bit]:
    """Return random bits of what was saved, as many from its index as from data files, and from ``.zarray`` files."""
    source = random.Random(seed)
    sizes = {name: file.stat().st_size for name, file in _files(path).items()}
    kinds: dict[str, list[str]] = {}
    for name, size in sizes.items():
        if size:
            kinds.setdefault(_kind(name), []).append(name)
    chosen: list[Bit] = []
    for _ in range(count):
        name = source.choice(kinds[source.choice(list(kinds))])
        chosen.append(Bit(name, source.randrange(sizes[name]), source.randrange(8)))
    return chosen


def _kind(name: str) -> str:
    """Say what a file is for."""
    if name == ARCHIVE:
        return "archive"
    return "index" if name in _INDEXES else ".zarray files" if name.endswith(".zarray") else "data files"


def flipped(name: str, path: Path, bits: Iterable[Bit]) -> Tally:
    """Flip each bit of what is at ``path`` in turn and look."""
    subject = SUBJECTS[name]
    truth = fingerprint(subject.state())
    places = _places(path)
    tally = Tally()
    for bit in bits:
        with (path / bit.file).open("r+b", buffering=0) as file:
            before = os.pread(file.fileno(), 1, bit.byte)
            os.pwrite(file.fileno(), bytes([before[0] ^ 1 << bit.bit]), bit.byte)
            outcome, wrong = look(path / subject.file, truth, places.named(bit), subject.metadata)
            os.pwrite(file.fileno(), before, bit.byte)
        tally.outcomes[f"{_kind(bit.file)}: {outcome}"] += 1
        tally.violations += (f"{bit}: {what}" for what in wrong)
    if look(path / subject.file, truth, "", subject.metadata) != ("unharmed", []):
        tally.violations.append("it does not load after its bits were put back")
    return tally


@dataclasses.dataclass(frozen=True, slots=True)
class _Places:
    """Which leaf lies where."""

    spans: dict[str, list[tuple[int, int, str]]]
    """File -> first byte, byte behind the last one, key of the leaf."""

    def named(self, bit: Bit) -> str:
        """Return what a report of that bit must name: the leaf that it is in, else the file."""
        for start, stop, key in self.spans.get(bit.file, []):
            if start <= bit.byte < stop:
                return key
        return bit.file


def _places(path: Path) -> _Places:
    if (path / ARCHIVE).exists():
        return _Places({ARCHIVE: [(0, 1 << 62, "")]})  # of a directory that is damaged it is not known what it named
    if not (path / "treering.json").exists():
        # A folder for each leaf; only keys with a dot in them are escaped.
        files = [name for name in _files(path) if "/" in name]
        return _Places({name: [(0, 1 << 62, name.rpartition("/")[0].replace("%2E", "."))] for name in files})
    index = parse_index((path / "treering.json").read_bytes())
    chunks = index.chunks
    spans: dict[str, list[tuple[int, int, str]]] = {}
    for leaf, file, offset, nbytes in zip(chunks.leaf, chunks.file, chunks.offset, chunks.nbytes, strict=True):
        spans.setdefault(index.files[file].name, []).append((offset, offset + nbytes, index.keys[leaf]))
    return _Places(spans)


def look(path: Path, truth: str, named: str, beside: dict[str, Any] = _METADATA) -> tuple[str, list[str]]:
    """Load and verify; return what became of it, and what must not be."""
    wrong: list[str] = []
    refusal, doubt = "", ""
    try:
        tree = treering.load(path)
        with treering.open(path) as opened:
            metadata = dict(opened.metadata)
        if fingerprint(tree) != truth or metadata != beside:
            wrong.append("SILENTLY WRONG")
    except TreeringError as error:
        refusal = str(error)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is not ours
        wrong.append(f"load raised {type(error).__name__}: {error}")
        refusal = named
    try:
        verified = treering.verify(path)
        doubt = "" if verified else str(verified)
    except TreeringError as error:
        doubt = str(error)
    except Exception as error:  # noqa: BLE001 - as above
        wrong.append(f"verify raised {type(error).__name__}: {error}")
        doubt = named
    if bool(refusal) != bool(doubt):
        wrong.append(f"load says {refusal or 'good'!r}, verify says {doubt or 'good'!r}")
    wrong += (f"{named} is not named: {text}" for text in (refusal, doubt) if text and named not in text)
    return ("silently wrong" if wrong and not refusal else "detected" if refusal else "unharmed"), wrong
