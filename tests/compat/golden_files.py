"""The golden files: where they lie, and what a reader has to make of each."""

from __future__ import annotations

import base64
import dataclasses
import json
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["EFORMER", "FLAX", "FlaxFile", "dtype_named", "flax_file", "flax_names"]

FLAX = Path(__file__).parent / "golden" / "flax"
EFORMER = Path(__file__).parent / "golden" / "eformer"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlaxFile:
    """One file that flax wrote."""

    name: str
    """Name of the case."""
    data: bytes
    """The file."""
    state: Any
    """What msgpack_restore has to return."""
    writer: str
    """The function that wrote it."""
    max_chunk_size: int
    """MAX_CHUNK_SIZE while it was written."""


def dtype_named(name: str) -> np.dtype:
    """The dtype of that name, of numpy or of ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, name, name))


def _array(node: dict[str, Any]) -> Any:
    raw = bytes.fromhex(node["raw"]) if "raw" in node else zlib.decompress(base64.b64decode(node["zraw"]))
    array = np.frombuffer(raw, dtype_named(node["dtype"])).reshape(node["shape"])
    return array if node["t"] == "ndarray" else array[()]


def _float(text: str) -> float:
    return float(text) if text in {"nan", "inf", "-inf"} else float.fromhex(text)


def _value(node: dict[str, Any]) -> Any:
    content = node.get("v")
    match node["t"]:
        case "none":
            return None
        case "bool" | "str":
            return content
        case "int":
            return int(str(content))
        case "float":
            return _float(str(content))
        case "complex":
            assert isinstance(content, list)
            return complex(_float(content[0]), _float(content[1]))
        case "bytes":
            return bytes.fromhex(str(content))
        case "dict":
            assert isinstance(content, list)
            return {_value(key): _value(value) for key, value in content}
        case "list":
            assert isinstance(content, list)
            return [_value(item) for item in content]
        case _:
            return _array(node)


def flax_names() -> list[str]:
    """The names of all cases; long doubles only where this machine has those of x86-64."""
    names = sorted(path.stem for path in FLAX.glob("*.msgpack"))
    has_x86_long_double = hasattr(np, "float128") and np.finfo(np.longdouble).nmant == 63
    return [name for name in names if name != "dtypes_longdouble" or has_x86_long_double]


def flax_file(name: str) -> FlaxFile:
    """Read one case."""
    told = json.loads((FLAX / f"{name}.json").read_text(encoding="utf-8"))
    return FlaxFile(
        name=name,
        data=(FLAX / f"{name}.msgpack").read_bytes(),
        state=_value(told["state"]),
        writer=told["writer"],
        max_chunk_size=told["max_chunk_size"],
    )
