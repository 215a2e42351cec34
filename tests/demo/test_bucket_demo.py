"""The demo of buckets: when it kills, what it says of requests, and the whole of it on a real server."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from typing import Any

import pytest

from demo import bucket_story
from demo.bucket_story import _in_words, _killed_in_the_midst
from tests.command import treering
from torture.fault_proxy import Fault, Seen

KEY = "/bucket/demo/run/step_00000003/treering.json"
DATA = "/bucket/demo/run/step_00000003/data-00.safetensors?partNumber=1&uploadId=u"


class Proxy:
    def __init__(self, *seen: Seen) -> None:
        self.seen = list(seen)


class Patient:
    """A process that commits while it is held still, if it is quick."""

    has_ended = False

    def __init__(self, proxy: Proxy, *, quick: bool) -> None:
        self.calls: list[str] = []
        self._proxy = proxy
        self._quick = quick

    def hold_still(self) -> None:
        self.calls.append("held still")
        if self._quick:
            self._proxy.seen.append(Seen("PUT", KEY, True, False))

    def go_on(self) -> None:
        self.calls.append("goes on")

    def kill(self) -> None:
        self.calls.append("killed")


@pytest.mark.parametrize("quick", [False, True])
def test_only_a_save_that_has_not_begun_to_commit_is_killed(monkeypatch: pytest.MonkeyPatch, quick: bool) -> None:
    monkeypatch.setattr(bucket_story, "_SETTLES_S", 0.0)
    part = Seen("PUT", DATA, False, False, status=200)
    proxy = Proxy(Seen("PUT", KEY, True, False, status=200), part, Seen("PUT", DATA, False, False))
    child: Any = Patient(proxy, quick=quick)
    given: Any = proxy
    assert _killed_in_the_midst(given, child, 3) == (None if quick else 1)
    assert child.calls == ["held still", "goes on" if quick else "killed"]
    child.calls.clear()
    proxy.seen += [Seen("PUT", KEY, True, False, status=200)] * 2
    assert _killed_in_the_midst(given, child, 3) is None
    assert child.calls == []


def test_a_request_is_told_in_words() -> None:
    lost = Seen("PUT", KEY, True, False, status=200, fault=Fault.DROP_ANSWER)
    assert _in_words(lost) == "PUT    treering.json if nothing else was put meanwhile: done, and its answer is lost"
    assert _in_words(Seen("GET", f"{KEY}?x", False, True, status=206)) == "GET    treering.json: answer 206"


def test_neither_the_command_nor_the_story_imports_jax() -> None:
    program = "import sys, demo.bucket; assert not {'jax', 'numpy', 'rich', 'obstore'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
    program = "import sys, demo.bucket_story; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.bucket
def test_the_demo_proves_everything_and_leaves_nothing_running() -> None:
    done = treering("--seconds", "0.5", module="demo.bucket", timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert done.stdout.count("✓") == 6
    assert "✗" not in done.stdout
    assert "treering.json if nothing else was put meanwhile: done, and its answer is lost" in done.stdout
    assert re.search(r"The save returned: step \d+ is committed", done.stdout)
    ports = re.search(r"port (\d+) of this machine; a proxy on port (\d+)", done.stdout)
    assert ports is not None
    for port in ports.groups():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(port)), timeout=5)
