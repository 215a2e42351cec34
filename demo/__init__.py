"""The demo: a small real training run is killed while it saves, moved to other meshes, damaged, and proves its bits."""

FILES = ("run", "report.html")
"""What the demo leaves in its folder."""
