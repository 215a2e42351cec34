"""Pieces of files in groups: all of them, once, with no more between them and no larger than allowed."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from tests.properties.strategies import quick
from treering._arrays.jobs import group_near


class Wanted(NamedTuple):
    file: int
    offset: int
    nbytes: int


PIECES = st.lists(st.builds(Wanted, st.integers(0, 2), st.integers(0, 400), st.integers(0, 60)), max_size=40)


@quick(300)
@given(PIECES, st.integers(0, 30), st.integers(1, 100))
def test_groups_hold_every_piece_once(pieces: list[Wanted], gap: int, most: int) -> None:
    groups = list(group_near(pieces, gap=gap, most=most))
    assert sorted(itertools.chain.from_iterable(groups)) == sorted(pieces)
    for group in groups:
        assert len({piece.file for piece in group}) == 1
        assert len(group) == 1 or group[-1].offset + group[-1].nbytes - group[0].offset <= most
        for one, other in itertools.pairwise(group):
            assert one.offset + one.nbytes <= other.offset <= one.offset + one.nbytes + gap


def test_contiguous_pieces_fill_their_groups() -> None:
    """A group ends where another piece would not fit: of pieces of a fifth, none has less than four fifths."""
    pieces = [Wanted(0, start, min(20, 1001 - start)) for start in range(0, 1001, 20)]
    groups = list(group_near(reversed(pieces), gap=0, most=100))
    assert [len(group) for group in groups] == [5] * 10 + [1]
