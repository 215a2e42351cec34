"""Benchmarks of treering against its peers and against the machine: ``python -m benchmarks NAME``."""
