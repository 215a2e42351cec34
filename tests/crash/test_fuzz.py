"""A slice of the fuzzer, and proof that it would notice."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering
from torture import doors, foreign_doors, foreign_images, foreign_mutate, mutate, seeds, wire
from torture.foreign_writers import Liar
from treering.errors import CorruptError
from treering.serialization import to_bytes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_a_slice_of_the_fuzzer_finds_nothing() -> None:
    command = [sys.executable, "-m", "torture", "fuzz", "--seconds", "5", "--seed", "11"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n0 violations" in done.stdout
    inputs = int(done.stdout.splitlines()[1].split()[0])
    assert inputs > 50


def lie(error: Exception) -> Callable[[], Any]:
    def enter() -> Any:
        raise error

    return enter


def spend_time() -> None:
    sum(range(20_000_000))


@pytest.mark.parametrize(
    ("enter", "outcome", "violation"),
    [
        (lambda: {"a": [np.zeros(3)]}, "accepted", None),
        (lie(CorruptError("damaged")), "CorruptError", None),
        (lie(CorruptError("x " * 2500)), "CorruptError", "a message of 5000 characters"),
        (lie(KeyError("a")), "KeyError", "KeyError: 'a'"),
        (lie(RecursionError("deep")), "RecursionError", "RecursionError: deep"),
        (lambda: bytes(8 << 30), "MemoryError", "MemoryError: "),  # more than what a test before left free
        (spend_time, "accepted", "took"),
    ],
)
def test_the_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enter: Callable[[], Any], outcome: str, violation: str | None
) -> None:
    monkeypatch.setattr(doors, "_picked", lambda *_: ("the door", enter))
    monkeypatch.setattr(doors, "_SECONDS", 0.05)
    verdict = doors.feed(b"data", random.Random(0), tmp_path / "scratch")
    assert (verdict.door, verdict.outcome) == ("the door", outcome)
    assert (verdict.violation or "").startswith(violation or "")
    assert (verdict.violation is None) == (violation is None)


def test_the_same_seed_gives_the_same_inputs() -> None:
    starts = list(seeds.seeds(None).values())
    assert len(starts) > 20
    first, again = (
        [mutate.mutated(starts[n % len(starts)], starts[n % 7], random.Random(f"5:{n}")) for n in range(300)]
        for _ in range(2)
    )
    assert first == again
    assert len(set(first)) > 250


def test_the_walker_finds_the_values_inside_extensions() -> None:
    data = to_bytes({"kernel": np.ones((3, 2), np.float32), "step": 3})
    found = wire.tokens(data)
    assert (found[0].start, found[0].end) == (0, len(data))
    texts = {data[token.start : token.end] for token in found}
    assert {b"\xa6kernel", b"\xa4step", b"\x03", b"\xa7float32", b"\x92\x03\x02"} <= texts


def test_the_walker_survives_what_it_made() -> None:
    for data in (
        b"\xc7\xff\x01" * 9000,
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\xc6",
        b"",
    ):
        assert all(token.end <= len(data) for token in wire.tokens(data))


def test_trees_of_other_programs_are_read_also_when_they_are_written_anew(tmp_path: Path) -> None:
    starts = foreign_images.foreign_seeds()
    assert len(starts) > 20
    assert any(image.databases for image in starts.values())
    for number, image in enumerate(starts.values()):
        whole = foreign_mutate.write_databases(image, Liar(random.Random(number), 0.0))
        assert treering.verify(whole.write(tmp_path / "tree")).ok


def test_the_same_seed_gives_the_same_trees() -> None:
    starts = list(foreign_images.foreign_seeds().values())
    first, again = (
        [foreign_mutate.mutated_image(starts[n % len(starts)], random.Random(f"5:{n}")).pack() for n in range(100)]
        for _ in range(2)
    )
    assert first == again
    assert len(set(first)) > 80


def test_what_was_read_from_outside_of_a_tree_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leaked = np.frombuffer(foreign_mutate.OUTSIDE * 3, np.float32)
    monkeypatch.setattr(foreign_doors, "_DOORS", (lambda *_: {"a": [leaked]},))
    image = foreign_images.foreign_seeds()["npy"]
    verdict = foreign_doors.feed_image(image, random.Random(0), tmp_path / "tree")
    assert verdict.violation == "read what lies outside of the tree"
    monkeypatch.setattr(foreign_doors, "_DOORS", (lambda *_: {"a": [leaked[1:2]]},))
    assert foreign_doors.feed_image(image, random.Random(0), tmp_path / "tree").violation is None
