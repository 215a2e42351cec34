"""Which runs of the notebooks a build may take from an earlier one."""

import hashlib
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


def digest_of_source() -> str:
    """Return a digest of every module of treering: what a notebook prints may change with any of them."""
    digest = hashlib.sha256()
    for path in sorted(SOURCE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
