"""Every point at which processes are attacked is a function that is there."""

import importlib

import pytest

from torture import process_table
from torture.process_points import Point

POINTS = [point for table in vars(process_table).values() if isinstance(table, tuple) for point in table]


@pytest.mark.parametrize("place", sorted({point.place for point in POINTS if isinstance(point, Point)}))
def test_the_place_of_a_point_is_a_function(place: str) -> None:
    module, _, names = place.partition(":")
    found = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    assert callable(found)
