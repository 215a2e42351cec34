"""Runs: the steps of a training loop, which of them stay, and how to resume."""
