"""One logger, silent by default, and duration events for listeners of jax."""

import logging
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from treering._values.telemetry import EVENTS, TRAFFIC, phase, report

PAGE = Path(__file__).parents[2] / "docs" / "telemetry.md"


def test_the_page_lists_every_event_with_its_unit() -> None:
    rows = re.findall(
        r"^\| `/treering/(.*?)` \| (.*?) \| (.*?) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert [(name, how, unit.strip(), meaning) for name, how, unit, meaning in rows] == [
        (name, *kind) for name, kind in EVENTS.items()
    ]


def test_a_phase_tells_of_the_bytes_that_it_moved_and_the_operation_of_all(caplog: pytest.LogCaptureFixture) -> None:
    heard: dict[str, float] = {}

    def listen(event: str, value: float, **_: str | int) -> None:
        heard[event] = value

    jax.monitoring.register_scalar_listener(listen)
    try:
        with caplog.at_level(logging.DEBUG, "treering"), report("save", "a"):
            TRAFFIC.add(requests=3, retries=1, sent=7)
            with phase("save/write") as moved:
                moved.nbytes = 3072
            with phase("save/commit"):
                pass
    finally:
        jax.monitoring.unregister_scalar_listener(listen)
    assert heard["/treering/save/bytes"] == 3072
    assert heard["/treering/save/throughput"] > 3072
    assert [heard[f"/treering/{name}"] for name in ("requests", "retries", "sent", "received")] == [3, 1, 7, 0]
    lines = [record.getMessage() for record in caplog.records]
    assert [bool(re.search(r", 3.00 KiB \([\d.]+ \w+/s\)", line)) for line in lines] == [True, False, True]


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
