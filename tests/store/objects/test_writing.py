"""The parts of an upload hold the bytes that were given, for as long as they are held."""

import numpy as np
import pytest

from treering._store.objects.writing import fill_parts


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


@pytest.mark.parametrize("held_back", [0, 1, 3, 100])
def test_memory_of_a_part_is_used_again_only_once_it_is_let_go(held_back: int) -> None:
    part, whole = 100_000, np.random.default_rng(0).bytes(1_050_000)
    given = (bytearray(whole[start : start + 70_000]) for start in range(0, len(whole), 70_000))
    held: list[memoryview] = []
    sent, places = b"", set()
    for view in fill_parts(given, len(whole), part):
        places.add(address(view))
        held.append(view)
        del view
        while len(held) > held_back:
            sent += held.pop(0)
    sent += b"".join(held)
    assert sent == whole
    assert len(places) <= held_back + 2
    assert held_back < 100 or len(places) == 11
