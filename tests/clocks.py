"""Time as tests want it: how long treering waits, and what the clock says."""

import dataclasses
import time
from typing import Any

import pytest

from treering._values import timing


def wait_at_most(patch: pytest.MonkeyPatch, **seconds: Any) -> None:
    """Let treering wait only so long, by the names of `Timing`; for the rest as long as always."""
    patch.setattr(timing, "current", dataclasses.replace(timing.current, **seconds))


def stop_clock(patch: pytest.MonkeyPatch, at: float) -> None:
    """Let the clock say this, in POSIX seconds."""
    patch.setattr(time, "time", lambda: at)
