"""The real Orbax as referee of what reads its checkpoints; where it is missing these tests are left out."""

from __future__ import annotations

import importlib.util

HERE = importlib.util.find_spec("orbax") is not None

collect_ignore_glob = [] if HERE else ["test_*.py"]


def pytest_report_header() -> str:
    """Say at the top of the run whether Orbax takes part."""
    return "orbax: is the referee" if HERE else "orbax: is not here, tests/compat/orbax runs with dev.py referee"
