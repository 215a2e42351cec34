"""The peak of a case is its peak: not its input, not its leftovers, and not only what it keeps."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from benchmarks import memory

MIB = 1 << 20
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not memory.available(), reason="only Linux can reset and report a peak")


def peak_of(begin: str, monkeypatch: pytest.MonkeyPatch, check: str = "lambda result: None") -> memory.Peak:
    """The peak of a case whose begin function has this body, with its input of 32 MiB in `source`."""
    program = f"""
import mmap, pathlib, numpy as np
from benchmarks.memory import serve
from benchmarks.measure import Case
def begin():
    source = np.ones({32 * MIB}, np.uint8)
{textwrap.indent(textwrap.dedent(begin), "    ")}
    return work
serve(Case(name="it", begin=begin, check={check}))
"""
    monkeypatch.chdir(ROOT)
    peak, fault = memory.ask([sys.executable, "-c", program])
    assert fault is None
    return peak


def near(size: int, wanted: int) -> bool:
    return abs(size - wanted) < 4 * MIB


def test_a_result_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = peak_of("work = lambda: source.copy()", monkeypatch)
    assert near(peak.extra, 32 * MIB)
    assert near(peak.kept, 32 * MIB)
    assert near(peak.anonymous, 32 * MIB)


def test_what_is_freed_again_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = peak_of("work = lambda: (source.copy() + source.copy())[:10].copy()", monkeypatch)
    assert peak.extra > 60 * MIB
    assert near(peak.kept, 0)


def test_an_input_and_what_was_freed_before_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = peak_of(
        """
        blocks = [bytes(1 << 16) for _ in range(1000)]
        del blocks
        work = lambda: source
        """,
        monkeypatch,
    )
    assert near(peak.extra, 0)


def test_small_blocks_freed_before_do_not_hide_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = peak_of(
        """
        blocks = [bytes([1]) * (1 << 16) for _ in range(1000)]
        del blocks
        work = lambda: [bytes([1]) * (1 << 16) for _ in range(1000)]
        """,
        monkeypatch,
    )
    assert near(peak.extra, 1000 << 16)


def test_file_pages_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(32 * MIB))
    peak = peak_of(
        f"""
        def work():
            mapped = np.memmap({str(path)!r}, np.uint8, "r")
            mapped[::4096].sum()
            return mapped
        """,
        monkeypatch,
    )
    assert near(peak.extra, 32 * MIB)
    assert near(peak.mapped, 32 * MIB)
    assert near(peak.anonymous, 0)


def test_a_process_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="ended early"):
        memory.ask([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(RuntimeError, match="no answer"):
        peak_of("work = lambda: __import__('os')._exit(3)", monkeypatch)
