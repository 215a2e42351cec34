"""What lies in folders, and how many files this process holds open."""

from pathlib import Path


def names(folder: Path | str) -> list[str]:
    """All names in a folder, hidden ones too, sorted."""
    return sorted(entry.name for entry in (Path(folder) if isinstance(folder, str) else folder).iterdir())


def listing(path: Path) -> dict[str, bytes | None]:
    """Every file below a path with its bytes, every folder with None."""
    return {
        str(inner.relative_to(path)): inner.read_bytes() if inner.is_file() else None
        for inner in sorted(path.rglob("*"))
    }


def open_descriptors() -> int:
    """How many descriptors this process holds, the one that looks among them."""
    return len(list(Path("/proc/self/fd").iterdir()))
