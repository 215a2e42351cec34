"""The rules that decide which steps of a run stay; ``treering.rules`` has all rules."""

# ruff: noqa: F403, F405 - the names are those of __all__
from treering.rules import *

__all__ = [
    "AnyRule", "KeepBest", "KeepEvery", "KeepLast", "KeepLatest", "KeepNear", "KeepSteps", "Policy", "StepFacts",
    "Verdict", "best_steps", "retained",
]  # fmt: skip
