"""The real eformer as referee. It is heavy, so it lives in an environment of its own: ``python3 dev.py referee``.

Where it is missing these tests are left out, and the run's header says so.
"""

from __future__ import annotations

import importlib.util

HERE = importlib.util.find_spec("eformer") is not None

collect_ignore_glob = [] if HERE else ["test_*.py"]


def pytest_report_header() -> str:
    """Say at the top of the run whether eformer takes part."""
    return "eformer: is the referee" if HERE else "eformer: is not here, tests/compat/eformer runs with dev.py referee"
