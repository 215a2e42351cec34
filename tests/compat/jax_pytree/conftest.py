"""jax as referee of what reads its checkpoints; it writes them with flatbuffers, where that is installed."""

from __future__ import annotations

import importlib.util

HERE = importlib.util.find_spec("flatbuffers") is not None

collect_ignore_glob = [] if HERE else ["test_*.py"]


def pytest_report_header() -> str:
    """Say at the top of the run whether jax takes part."""
    return f"flatbuffers: {'is here' if HERE else 'is not here, tests/compat/jax_pytree runs with dev.py referee'}"
