"""The map of the house has every module, and none that is not there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOUSE = ROOT / "src" / "treering"
ROOMS = re.compile(r"^\*\*(?:`([\w/]+)/`|[^*]+)\*\*\n\n((?:- .*\n)+)", re.MULTILINE)


def test_every_module_is_on_the_map() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("## Every module\n")[2]
    named = {
        f"{room}/{name}" if room else name
        for room, lines in ROOMS.findall(text)
        for name in re.findall(r"^- `([\w.]+)`: .", lines, re.MULTILINE)
    }
    there = {path.relative_to(HOUSE).as_posix() for path in HOUSE.rglob("*.py") if path.name != "__init__.py"}
    assert sorted(there - named) == [], "modules that are not on the map"
    assert sorted(named - there) == [], "lines of the map without a module"


def test_what_the_map_points_to_is_there() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("## Every module\n")[0]
    lost = [name for name in re.findall(r"`(_\w+/[\w/]+\.py)`", text) if not (HOUSE / name).exists()]
    assert lost == []
