"""Sizes from which treering does things in another way, lowered so that small inputs reach them."""

import pytest

from treering import serialization
from treering._store.posix import writing


def chunk_arrays_from(patch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Let treering cut arrays of a state dict into chunks of so many bytes."""
    patch.setattr(serialization, "MAX_CHUNK_SIZE", nbytes)


def write_past_the_cache(patch: pytest.MonkeyPatch, *, above: int = 0, free_share: float = 0) -> None:
    """Let files of more bytes, which need more than a share of the free memory, go past the page cache."""
    patch.setattr(writing, "DIRECT_FROM", above)
    patch.setattr(writing, "FREE_SHARE", free_share)


def write_in_runs(patch: pytest.MonkeyPatch, nbytes: int, *, piece: int = 1 << 20) -> None:
    """Let the disk begin with each run of so many bytes, which are written by pieces."""
    patch.setattr(writing, "_RUN_BYTES", nbytes)
    patch.setattr(writing, "_PIECE_BYTES", piece)
