"""Flax's msgpack: bytes, files, and the way back into a target."""
