"""Processes that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.multiprocess.jobs import Crews


@pytest.fixture(scope="package")
def crews() -> Iterator[Crews]:
    """Jobs that do the workers of several tests, one after another."""
    with Crews() as jobs:
        yield jobs
