"""A process that counts until it is killed."""

from __future__ import annotations

import time

from demo.telling import tell

if __name__ == "__main__":
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        tell("counted")
        time.sleep(0.01)
