"""What the demo's processes tell the one that started them: one JSON object a line."""

from __future__ import annotations

import json
import sys
from typing import Any

__all__ = ["tell"]


def tell(event: str, **members: Any) -> None:
    """Write one event to stdout, at once."""
    sys.stdout.write(json.dumps({"event": event} | members) + "\n")
    sys.stdout.flush()
