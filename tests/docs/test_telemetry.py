"""The recipes of the page about telemetry run as they stand there, each in a program of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "telemetry.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "package"), [("Prometheus", "prometheus_client"), ("OpenTelemetry", "opentelemetry.sdk.metrics")]
)
def test_a_recipe_runs_as_it_stands_there(title: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    program = "".join(re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE))
    assert "assert" in program
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}", "JAX_PLATFORMS": "cpu"}
    done = [sys.executable, "-W", "error", "-c", program]
    found = subprocess.run(
        done, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (found.returncode, found.stdout) == (0, ""), found.stderr
