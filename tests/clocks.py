"""Time as tests want it: how long treering waits, and what the clock says."""

import time
from typing import Any

import pytest

from tests import limits


def wait_at_most(patch: pytest.MonkeyPatch, **seconds: Any) -> None:
    """Let treering wait only so long, by the names of `Timing`; for the rest as long as always."""
    limits.shorten(patch, **seconds)


def stop_clock(patch: pytest.MonkeyPatch, at: float) -> None:
    """Let the clock say this, in POSIX seconds."""
    patch.setattr(time, "time", lambda: at)
