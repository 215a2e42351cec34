"""What lies in a folder, by name."""

from pathlib import Path


def names(folder: Path | str) -> list[str]:
    """All names in a folder, hidden ones too, sorted."""
    return sorted(entry.name for entry in Path(folder).iterdir())
