"""The map of the code names every room, and nothing that is not there; it stays short."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "treering"
MAP = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def test_every_room_is_on_the_map() -> None:
    rooms = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert sorted(room for room in rooms if f"{room}/" not in MAP) == []


def test_what_the_map_points_to_is_there() -> None:
    named = set(re.findall(r"`((?:_\w+/)[\w/]*(?:\.py)?)`", MAP))
    assert len(named) > 20
    assert sorted(name for name in named if not (SOURCE / name).exists()) == []


def test_the_map_is_short() -> None:
    assert len(MAP.encode()) <= 12_000
