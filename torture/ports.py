"""Ports for programs that are told where to listen."""

from __future__ import annotations

import contextlib
import secrets
import socket

__all__ = ["free_port"]


def free_port() -> int:
    """Return a port that nobody listens at, of those that no connection is given before somebody listens at it."""
    while True:
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", 10_000 + secrets.randbelow(20_000)))
            return int(listener.getsockname()[1])
