"""What lies in folders, the same in memory, and how many files this process holds open."""

from pathlib import Path

from treering._store.objects.url import MemoryPath
from treering._store.resolve import write_file


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


def copy_to_memory(folder: Path, url: str) -> None:
    """Put every file below a folder at its path below a URL of ``memory://``."""
    for file in filter(Path.is_file, folder.rglob("*")):
        data = file.read_bytes()
        write_file(MemoryPath(f"{url}/{file.relative_to(folder).as_posix()}"), [data], len(data))
