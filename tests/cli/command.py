"""The command line as a user starts it: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence


def treering(
    *arguments: str, code: int | None = None, timeout: float = 60, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m treering``; assert its exit code where one is given, and that no traceback came."""
    clean = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "FORCE_COLOR", "XLA_FLAGS"}}
    command: Sequence[str] = [sys.executable, "-m", "treering", *arguments]
    done = subprocess.run(
        command,
        env=clean | {"PYTHONIOENCODING": "utf-8"} | environment,
        capture_output=True,
        text=True,
        encoding=environment.get("PYTHONIOENCODING", "utf-8"),
        timeout=timeout,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    if code is not None:
        assert done.returncode == code, done.stdout + done.stderr
    return done
