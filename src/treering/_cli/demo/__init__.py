"""The demo: a small real training run that is saved, killed, resumed on another mesh and proved equal to the bit."""

__all__ = ["FILES"]

FILES = ("checkpoint",)
"""What the demo leaves in its folder."""
