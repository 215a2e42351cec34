"""What the demo's processes tell the one that started them: one JSON object a line."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

_lock = threading.Lock()


def tell(event: str, **members: Any) -> None:
    """Write one event to stdout, at once; any thread may."""
    line = json.dumps({"event": event} | members) + "\n"
    with _lock:
        sys.stdout.write(line)
        sys.stdout.flush()
