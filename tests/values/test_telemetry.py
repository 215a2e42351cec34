"""One logger, silent by default, and duration events for listeners of jax."""

import logging
import re
import subprocess
import sys

import jax
import pytest

from treering._values.telemetry import phase, report


def test_an_operation_is_one_line_and_a_phase_another(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "treering"), report("save", "a\x1bb"), phase("save/write"):
        pass
    with pytest.raises(KeyError), caplog.at_level(logging.INFO, "treering"), report("load", "c"), phase("load/read"):
        raise KeyError("x")
    shown = [(record.levelname, re.sub(r"\d[\d.]* \S+$", "T", record.getMessage())) for record in caplog.records]
    assert shown == [
        ("DEBUG", "save/write: T"),
        ("INFO", r"save 'a\x1bb': done in T"),
        ("INFO", "load 'c': KeyError after T"),
    ]


def test_listeners_of_jax_hear_of_what_succeeded(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[tuple[str, float]] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        heard.append((event, duration_secs))
        if event == "/treering/remove":
            raise ValueError("a bad listener")

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with report("save", "a"), phase("save/write"):
            pass
        with pytest.raises(KeyError), report("load", "a"):
            raise KeyError("x")
        with report("remove", "a"):
            pass
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert [event for event, _ in heard] == ["/treering/save/write", "/treering/save", "/treering/remove"]
    assert all(0 <= seconds < 10 for _, seconds in heard)
    assert "a listener of jax.monitoring raised" in caplog.text


def test_it_is_silent_where_logging_is_not_configured_and_needs_no_jax() -> None:
    program = """
import sys
from treering._values.telemetry import report
with report("save", "a"):
    pass
assert "jax" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
