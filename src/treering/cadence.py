"""The rules that decide when a run saves; ``treering.rules`` has all rules."""

from treering.rules import AnyTime, Cadence, Decision, LastSave, SaveEvery

__all__ = ["AnyTime", "Cadence", "Decision", "LastSave", "SaveEvery"]
