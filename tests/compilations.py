"""How many programs XLA compiles."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

__all__ = ["compiled"]

COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The compilations from here on, by any thread."""
    found: list[str] = []

    def note(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        if event == COMPILED:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield found
    jax.monitoring.unregister_event_duration_listener(note)
