"""What another library saved, restored in two ways: as it is, and after a conversion to a checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

import treering

__all__ = ["Prepare", "prepare"]

Prepare: TypeAlias = Callable[[Path], Path]


@pytest.fixture(params=["as it is", "converted"])
def prepare(request: pytest.FixtureRequest, tmp_path: Path) -> Prepare:
    """Return what makes of the path of a file or folder the path that is to be restored."""
    targets = (tmp_path / f"converted-{number}" for number in itertools.count())

    def path_of(given: Path) -> Path:
        if request.param == "as it is":
            return given
        target = next(targets)
        treering.convert(given, target)
        return target

    return path_of
