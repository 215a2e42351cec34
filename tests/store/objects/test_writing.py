"""The pieces of an upload hold the bytes that were given, for as long as they are held."""

from array import array
from collections.abc import Iterator

import numpy as np
import pytest

from treering._arrays.host import read_checked
from treering._store.memory_pool import PIECE_BYTES, MemoryPool, lasting_pieces
from treering._values.checksums import block_bytes, block_count


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


@pytest.mark.parametrize("held_back", [0, 1, 3, 100])
def test_memory_of_a_piece_is_used_again_only_once_it_is_let_go(held_back: int) -> None:
    whole = np.random.default_rng(0).bytes(5 * PIECE_BYTES + 1000)
    given = (bytearray(whole[start : start + 3_000_000]) for start in range(0, len(whole), 3_000_000))
    held: list[memoryview] = []
    sent, places = b"", set()
    for view in lasting_pieces(given, len(whole)):
        places.add(address(view))
        held.append(view[:])  # as obstore does: the view itself need not be kept
        del view
        while len(held) > held_back:
            sent += held.pop(0)
    sent += b"".join(held)
    assert sent == whole
    assert len(places) <= held_back + 2
    assert held_back < 100 or len(places) == 7


def test_a_leaf_is_copied_once() -> None:
    leaf = np.random.default_rng(0).integers(0, 256, 3 * PIECE_BYTES + 5, np.uint8)
    block = block_bytes(leaf.nbytes)
    checksums = array("Q", bytes(8 * block_count(leaf.nbytes, block)))
    made: list[int] = []

    def read() -> Iterator[bytes | memoryview]:
        for piece in read_checked(leaf, block, checksums, 0, MemoryPool()):
            made.append(address(memoryview(piece)))
            yield piece

    pieces = list(lasting_pieces(read(), leaf.nbytes))
    assert [address(piece) for piece in pieces][:3] == made[:3]
    given = leaf.tobytes()
    leaf[:] = 0
    assert b"".join(pieces) == given
