"""Checkpoints: saved, loaded and opened, by one process or by a job of many."""
