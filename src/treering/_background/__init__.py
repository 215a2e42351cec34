"""Saves in the background: a queue of jobs, the thread that writes them, deferred errors, shutdown."""
