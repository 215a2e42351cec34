"""The demo: a small real training run is killed while it saves, moved to other meshes, damaged, and proves its bits."""

__all__ = ["FILES"]

FILES = ("run",)
"""What the demo leaves in its folder."""
