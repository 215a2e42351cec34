"""transformers and PyTorch as referees of Hugging Face folders; where they are missing these tests are left out."""

from __future__ import annotations

import importlib.util
import os

HERE = all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))

collect_ignore_glob = [] if HERE else ["test_*.py"]

# Nothing is asked of the hub: every model is made here.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_report_header() -> str:
    """Say at the top of the run whether they take part."""
    if HERE:
        return "transformers and torch: are the referees"
    return "transformers or torch: is not here, tests/compat/huggingface runs with dev.py referee on Python 3.11"
