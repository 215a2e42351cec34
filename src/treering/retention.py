"""The rules that decide which steps of a run stay; ``treering.rules`` has all rules."""

from treering.rules import (
    AnyRule,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepLatest,
    KeepNear,
    KeepSteps,
    Policy,
    StepFacts,
    Verdict,
    best_steps,
    retained,
)  # fmt: skip

__all__ = [
    "AnyRule", "KeepBest", "KeepEvery", "KeepLast", "KeepLatest", "KeepNear", "KeepSteps", "Policy", "StepFacts",
    "Verdict", "best_steps", "retained",
]  # fmt: skip
