"""Who writes, with what, and when."""

from __future__ import annotations

import datetime
import platform

import jax
import ml_dtypes
import numpy as np

from treering import __version__


def versions() -> dict[str, str]:
    """Return who writes, with what, and when: nothing of the machine or its user."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found = {"by": f"treering {__version__}", "at": now, "python": platform.python_version()}
    # From the modules: importlib.metadata would read files, in the middle of a save.
    return found | {"jax": jax.__version__, "numpy": np.__version__, "ml_dtypes": ml_dtypes.__version__}
