"""A job of several processes, as far as this one can tell."""

import jax
import pytest


def be_process(patch: pytest.MonkeyPatch, this: int, count: int) -> None:
    """Let this be a process of a job; nobody answers for the others."""
    patch.setattr(jax.distributed, "is_initialized", lambda: True)
    patch.setattr(jax, "process_index", lambda: this)
    patch.setattr(jax, "process_count", lambda: count)
