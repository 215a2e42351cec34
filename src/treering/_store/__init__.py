"""Bytes by name: reading and durably replacing files."""
