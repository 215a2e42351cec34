"""A tree -> the leaves that a key map makes it of, in any form that treering writes."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from treering._arrays.host import this_processes
from treering._arrays.mapped_source import cast_floats, unmap_source
from treering._arrays.source_arrays import tree_source
from treering._background.save_job import UNWATCHED
from treering._checkpoint.save_options import SaveOptions
from treering._checkpoint.targets import find_writer
from treering._format.selection import select
from treering._keymap.key_map import KeyMap
from treering._printable import list_lines
from treering._tree.flatten import flatten
from treering.errors import Unsupported


def save_mapped(tree: Any, key_map: KeyMap, options: SaveOptions) -> None:
    """Save what ``load`` with the same map makes the tree of; ``treering.save`` says more.

    Raises:
        Mismatch: the map does not fit the tree; the error has every finding, and nothing was written.
        Unsupported: the form cannot hold a leaf, or several processes hold the tree.
    """
    flat = flatten(tree)
    if options.together and this_processes(flat.leaves).count > 1:
        hint = "save without key_map, and pass it to treering.convert, or pass processes='this' on one process"
        raise Unsupported("several processes cannot save through a key map together", hint=hint)
    source = unmap_source(tree_source(flat), key_map)
    if options.dtype is not None:
        source = cast_floats(source, getattr(options.dtype, "__name__", str(options.dtype)))
    writer = find_writer(options.path, options.shown, options.form)
    module = importlib.import_module(writer.module)
    part = select(source.index.structure, source.index.keys, at=None, only=None)
    metadata = options.json_metadata()
    if losses := [loss.text for loss in module.find_losses(source, part, metadata)]:
        raise Unsupported(f"the form {writer.form!r} cannot hold:{list_lines(losses)}")
    module.write(source, part, dataclasses.replace(options, metadata=metadata, dtype=None), UNWATCHED)
