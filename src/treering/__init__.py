"""treering saves JAX pytrees and loads them back, verified and crash-safe.

``save`` and ``load`` a tree, ``open`` it lazily, ``inspect``, ``verify`` and ``diff`` checkpoints; a ``Run`` keeps the
steps of a training loop. Further modules are ``treering.serialization`` (flax's state dicts and msgpack),
``treering.leaves`` (eformer's leaves directories), ``treering.sharding`` and ``treering.tree``. Each name is imported
when it is first used, so importing treering is cheap.
"""

from __future__ import annotations

import importlib
import logging  # noqa: F401 - hooks run from the last one back: its own takes a lock that imports may wait for
import os
import sys
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treering import cadence as cadence
    from treering import checkpoint, errors, leaves, run, serialization, sharding, tree
    from treering import retention as retention
    from treering import rules as rules
    from treering._inspect.diff import diff
    from treering._inspect.inspect import inspect
    from treering._inspect.verify import verify
    from treering._keymap.key_map import KeyMap
    from treering._keymap.key_rule import KeyRule
    from treering._store.buckets import bucket
    from treering.checkpoint import abstract, convert, each, export, load, load_async, open, save, save_async  # noqa: A004
    from treering.rules import KeepBest, KeepEvery, KeepLast, SaveEvery
    from treering.run import Fallback, Run

__version__ = "0.3.0"
__all__ = [
    "Fallback", "KeepBest", "KeepEvery", "KeepLast", "KeyMap", "KeyRule", "Run", "SaveEvery", "__version__", "abstract",
    "bucket", "checkpoint", "convert", "diff", "each", "errors", "export", "inspect", "leaves", "load", "load_async",
    "open", "run", "save", "save_async", "serialization", "sharding", "tree", "verify",
]  # fmt: skip

_NAMES = {
    "_inspect.diff": ("diff",),
    "_inspect.inspect": ("inspect",),
    "_inspect.verify": ("verify",),
    "_keymap.key_map": ("KeyMap",),
    "_keymap.key_rule": ("KeyRule",),
    "_store.buckets": ("bucket",),
    "checkpoint": ("abstract", "convert", "each", "export", "load", "load_async", "open", "save", "save_async"),
    "rules": ("KeepBest", "KeepEvery", "KeepLast", "SaveEvery"),
    "run": ("Fallback", "Run"),
}
_HOMES = {name: f"treering.{home}" for home, names in _NAMES.items() for name in names}
_MODULES = (
    "cadence", "checkpoint", "errors", "leaves", "retention", "rules", "run", "serialization", "sharding", "tree",
)  # fmt: skip
_MOVED = {
    **dict.fromkeys(("Checkpoint", "ForeignKey", "LeafView", "OpaqueLeaf", "PendingSave", "StandIn"), "checkpoint"),
    "KeepSteps": "rules", "Stateful": "run", "register_node": "checkpoint",
}  # fmt: skip
_LONGEST_IMPORT = 60.0  # seconds


def _end_imports() -> None:
    """Wait until no other thread imports something for a call of treering.

    A forked process has none of the other threads, and would wait forever for a module that one of them was importing.
    """
    deadline = time.monotonic() + _LONGEST_IMPORT
    while any(map(_imports, sys._current_frames().items())) and time.monotonic() < deadline:  # noqa: SLF001 - documented
        time.sleep(0.001)


def _imports(thread: tuple[int, Any]) -> bool:
    """Tell whether a thread that is not this one imports treering, or what a module of it imports."""
    number, frame = thread
    importing = False
    while frame is not None and number != threading.get_ident():
        importing = importing or frame.f_code.co_filename == "<frozen importlib._bootstrap>"
        if importing and frame.f_globals.get("__name__", "").partition(".")[0] == __name__:
            return True
        frame = frame.f_back
    return False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_end_imports)


if not TYPE_CHECKING:  # a type checker sees the imports above, and so a mistyped name

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            found = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)  # asked for once
            return found
        if name in _MODULES:
            return importlib.import_module(f"treering.{name}")
        if name in ("formats", "testing"):
            raise AttributeError(f"treering.{name} is imported by name: import treering.{name}")
        if name == "at":
            instead = "it is treering.bucket(url, ...) now, whose options belong to the path that it returns"
            raise AttributeError(f"module 'treering' has no attribute 'at': {instead}")
        if name in _MOVED:
            now = f"treering.{_MOVED[name]}"
            warnings.warn(f"treering.{name} is {now}.{name} now", DeprecationWarning, stacklevel=2)
            return getattr(importlib.import_module(now), name)
        raise AttributeError(f"module 'treering' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
