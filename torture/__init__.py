"""Attacks on treering that take longer than a test may: ``python -m torture --help``."""
