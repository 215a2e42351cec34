"""A slice of the saves that have too little room."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.crash.attacks import ROOT
from torture import limits

pytestmark = pytest.mark.slow

SLICE = """
import dataclasses, json, sys, tempfile, warnings
warnings.simplefilter("ignore", RuntimeWarning)
from pathlib import Path
from torture import limits
from torture.points import Report, chosen, rehearsed

limits._STEPS = 8
(scene,) = chosen([sys.argv[1]])
found = {}
with tempfile.TemporaryDirectory() as folder:
    rehearsed(scene, Path(folder, "scene"))
    for name in ("size_limits", "full_disks"):
        if name == "full_disks" and limits.mounting_reason(Path(folder, "mount")) is not None:
            continue
        report = Report()
        getattr(limits, name)(scene, Path(folder, "mount" if name == "full_disks" else "scene"), report)
        found[name] = dataclasses.asdict(report)
print(json.dumps(found))
"""


@pytest.mark.parametrize("scene", ["checkpoint, first", "checkpoint, overwrite"])
def test_too_little_room_changes_nothing(scene: str) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", SLICE, scene], env=environment, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    with tempfile.TemporaryDirectory() as folder:
        mounts = limits.mounting_reason(Path(folder, "mount")) is None
    assert set(found) == {"size_limits", "full_disks"} if mounts else {"size_limits"}
    for report in found.values():
        assert report["violations"] == []
        # From nothing to more than enough: both ends were seen.
        assert set(report["outcomes"]) == {"acknowledged", "error"}
