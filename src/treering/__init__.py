"""treering turns JAX pytrees into bytes and back.

The doors of this version: ``treering.serialization`` (flax's state dicts and msgpack, and files of them),
``treering.tree`` and ``treering.errors``. They load when first touched, so that importing treering costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treering import errors, serialization, tree

__version__ = "0.1.0"
__all__ = ["__version__", "errors", "serialization", "tree"]

_DOORS = frozenset({"errors", "serialization", "tree"})


if not TYPE_CHECKING:  # a type checker sees the imports above, and so a mistyped name

    def __getattr__(name: str) -> Any:
        if name in _DOORS:
            return importlib.import_module(f"treering.{name}")
        raise AttributeError(f"module 'treering' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
