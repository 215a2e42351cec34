"""Local paths: descriptors, locks, durable replacement, reading by position."""
