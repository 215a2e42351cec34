"""The demo: a small real training run that is saved, loaded in a fresh process and proved equal to the bit."""

__all__ = ["FILES"]

FILES = ("state.msgpack", "state.msgpack.gz")
"""What the demo leaves in its folder."""
