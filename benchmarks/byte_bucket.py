"""The server of `benchmarks.byte_server` in a process of its own, and what it was asked."""

from __future__ import annotations

import atexit
import http.client
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

__all__ = [
    "BUCKET",
    "NEAR_BUCKET",
    "SLOW_BUCKET",
    "Request",
    "ask_server",
    "in_sequence",
    "remove_objects",
    "start_server",
    "taken_log",
]

BUCKET = "bench"
SLOW_BUCKET = "slow"
"""The same objects; each request takes 50 ms."""
NEAR_BUCKET = "slow-30"
"""The same objects; each request takes 30 ms."""

_VARIABLE = "AWS_ENDPOINT_URL"
_OURS = "TREERING_BENCHMARKS_SERVER"
"""Set in processes whose parents have started the server."""
_DATA = re.compile(r"(^|/)data-[^/]*$")
_server: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True, slots=True)
class Request:
    """One request that the server answered."""

    method: str
    key: str
    query: str
    status: int
    began: float
    ended: float

    @property
    def is_data(self) -> bool:
        """Whether it moves array bytes, or a part of them."""
        return _DATA.search(self.key) is not None


def start_server() -> str:
    """The URL of the server, which is started when it is first asked for and ends with this process."""
    if _OURS not in os.environ:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.byte_server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        _server.append(process)
        assert process.stdout is not None  # piped
        os.environ[_OURS] = process.stdout.readline().decode().strip()
        os.environ |= {
            _VARIABLE: os.environ[_OURS],
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
    return os.environ[_OURS]


@atexit.register
def _stop() -> None:
    """End the server that this process started."""
    while _server:
        process = _server.pop()
        os.environ.pop(_OURS, None)
        process.kill()
        process.communicate()


def ask_server(method: str, target: str, body: bytes = b"") -> bytes:
    """Make one request and return the body of the answer.

    Raises:
        RuntimeError: the server refused.
    """
    connection = http.client.HTTPConnection(urlsplit(start_server()).netloc)
    try:
        connection.request(method, target, body)
        answer = connection.getresponse()
        data = answer.read()
    finally:
        connection.close()
    if answer.status >= 300:
        raise RuntimeError(f"{method} {target}: {answer.status} {data[:200]!r}")
    return data


def remove_objects(prefix: str) -> None:
    """Remove all objects whose keys begin so, and forget what was asked."""
    ask_server("DELETE", f"/-/{prefix}")
    taken_log()


def taken_log() -> list[Request]:
    """What the server answered since the last time, in order."""
    found: list[Sequence[Any]] = json.loads(ask_server("GET", "/-/requests"))
    return [Request(*each) for each in found]


def in_sequence(requests: Sequence[Request]) -> int:
    """How many of these can have waited for one another at most: the longest chain without an overlap in time.

    Example:
        >>> in_sequence([Request("GET", "a", "", 200, 0, 2), Request("GET", "b", "", 200, 1, 3)])
        1
    """
    count, end = 0, float("-inf")
    for each in sorted(requests, key=lambda request: request.ended):
        if each.began >= end:
            count, end = count + 1, each.ended
    return count
