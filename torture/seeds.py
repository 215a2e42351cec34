"""Real files to start from: the golden files of the tests, and a few that treering writes now."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

from treering.serialization import to_bytes, to_compressed_bytes

__all__ = ["GOLDEN", "seeds"]

GOLDEN = Path(__file__).parents[1] / "tests" / "compat" / "golden"
# Larger files make slower inputs, not better ones.
_LARGEST = 64 << 10


def seeds(folder: Path | None) -> dict[str, bytes]:
    """Return the starting files by name: those under ``folder`` (the golden files when it is None), and our own."""
    found = dict(_own())
    for path in sorted((folder or GOLDEN).rglob("*")):
        if path.is_file() and path.suffix not in {".json", ".md", ".npz"} and path.stat().st_size <= _LARGEST:
            found[path.name] = path.read_bytes()
    return found


def _own() -> dict[str, bytes]:
    params = {f"dense_{n}": {"kernel": np.ones((3, n), np.float32), "bias": np.zeros(n, "<i8")} for n in range(4)}
    dtypes = {name: np.zeros(3, getattr(ml_dtypes, name, name)) for name in ("bfloat16", "int4", "bool", "complex64")}
    scalars = {"none": None, "int": -(2**40), "float": 0.5, "str": "größe", "bytes": b"\0", "complex": 1j, "list": [1]}
    return {
        "own params": to_bytes({"params": params, "step": np.int32(3)}),
        "own dtypes": to_bytes({**dtypes, "scalar": np.float16(1), "empty": np.zeros((0, 5))}),
        "own scalars": to_bytes({**scalars, "tuple": (1, (2, [3]))}),
        "own array": to_bytes(np.arange(300, dtype=np.uint16)),
        "own gzip": to_compressed_bytes({"params": params}),
    }
