"""How many files each process writes, and which box goes where."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.plan.layouts import any_layouts
from treering._plan.save import LeafLayout, file_counts, files_by_position, plan_save


def test_who_has_only_a_leaf_without_items_has_a_file_too() -> None:
    empty = LeafLayout(nbytes_per_item=1, shape=(0, 4), boxes=((((0, 0), (0, 4)), (2, 1)),))
    plan = plan_save([empty], 4)
    assert plan.writers == (1,)
    assert file_counts(plan) == [0, 1, 0, 0]


@given(any_layouts(), st.sampled_from([1, 100, 1 << 20]))
def test_the_writers_are_those_with_parts(found: tuple[int, list[LeafLayout]], limit: int) -> None:
    processes, layouts = found
    plan = plan_save(layouts, processes)
    assert plan.writers == tuple(process for process in range(processes) if plan.parts_of(process))
    counts = file_counts(plan, limit)
    for load, count, process in zip(plan.loads, counts, range(processes), strict=True):
        assert (count > 0) == (process in plan.writers)
        assert load <= limit * count


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 40))
def test_boxes_go_where_they_begin(sizes: list[int], limit: int) -> None:
    count = max(1, -(-sum(sizes) // limit))
    files = files_by_position(sizes, count, limit)
    assert len(files) == len(sizes)
    assert list(files) == sorted(files)
    assert all(0 <= file < count for file in files)
    for file in set(files):
        mine = [size for size, found in zip(sizes, files, strict=True) if found == file]
        assert sum(mine[:-1]) <= limit
