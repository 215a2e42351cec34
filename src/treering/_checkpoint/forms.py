"""The forms that treering reads, one row each: the functions that open, list and verify what is at a path.

The functions are named here, not imported: a program that reads one form imports the code of that form alone, and what
looks at headers needs neither jax nor numpy. A new form is one module with these functions, and one row.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from treering._checkpoint.detect import Form, detect, import_function
from treering._store.asked import asking
from treering._store.open_folder import OpenFolder
from treering._store.resolve import kept

if TYPE_CHECKING:
    from treering._arrays.source import Source
    from treering._checkpoint.source import SharedIndex
    from treering._format.findings import Verification
    from treering._format.index import Index
    from treering._format.listing import Listing
    from treering._keymap.key_map import KeyMap
    from treering._view.progress import Progress


class FormFunctions(NamedTuple):
    """Where the functions of one form are, as ``module:name`` below ``treering``."""

    source: str
    """``(path, files, *, mapped)`` opens it to read leaves; ``files`` closes it."""
    listing: str
    """``(path)`` lists what its headers say."""
    verify: str
    """``(path, progress)`` reads and checks every byte."""


# fmt: off
_MSGPACK: Final = FormFunctions("_wire.msgpack_source:open_msgpack", "_inspect.inspect:list_msgpack_file",
                                "_inspect.verify:verify_msgpack")
_FORMS: Final[Mapping[Form, FormFunctions]] = {
    Form.CHECKPOINT: FormFunctions("_checkpoint.source:open_checkpoint", "_inspect.inspect:list_checkpoint",
                                   "_inspect.verify:verify_checkpoint"),
    # Of a run, the functions of a checkpoint work on its latest step, except to verify.
    Form.RUN: FormFunctions("", "", "_inspect.verify:verify_run"),
    Form.LEAVES: FormFunctions("_leaves.source:open_source", "_leaves.branches:list_leaves",
                               "_inspect.verify_leaves:verify_leaves"),
    Form.SAFETENSORS: FormFunctions("_checkpoint.source:open_safetensors", "_inspect.inspect:list_safetensors",
                                    "_inspect.verify:verify_safetensors"),
    Form.MSGPACK: _MSGPACK,
    Form.GZIP: _MSGPACK,
}
_REPLACED: Final = frozenset({Form.CHECKPOINT, Form.RUN, Form.LEAVES})
_FOREIGN: Final = FormFunctions("_foreign.foreign_tree:open_source", "_foreign.foreign_tree:list_tree",
                                "_foreign.foreign_tree:verify_tree")
# fmt: on


def open_source(
    path: str | os.PathLike[str], files: contextlib.ExitStack, *, mapped: bool, shared: SharedIndex | None = None
) -> Source:
    """Open what stands at ``path`` to read leaves; it stays open until ``files`` closes it.

    Args:
        path: the checkpoint or file.
        files: closes it.
        mapped: whether arrays may be maps of the files.
        shared: the index of the checkpoint at ``path``, if process 0 read it for all.

    Raises:
        NotFoundError, FormatError, UnsupportedError: as ``detect`` says.
        CorruptError: its headers contradict themselves.
        StoreError: the system refuses.
    """
    if shared is not None:
        return cast(
            "Source", import_function(_FORMS[Form.CHECKPOINT].source)(path, files, mapped=mapped, shared=shared)
        )
    return cast("Source", _call("source", path, files, mapped=mapped))


def stream_source(path: str | os.PathLike[str], files: contextlib.ExitStack) -> Source:
    """Open what stands at ``path`` to read it a piece at a time where that can be; raises as `open_source` does."""
    path = kept(path)
    with asking(once=True):
        if detect(path) is Form.MSGPACK:
            return cast("Source", import_function("_wire.msgpack_source:stream_msgpack")(path, files))
        return open_source(path, files, mapped=False)


@contextlib.contextmanager
def read_source(
    path: str | os.PathLike[str], *, mapped: bool, key_map: KeyMap | None = None, shared: SharedIndex | None = None
) -> Iterator[Source]:
    """Open what stands at ``path``, through a key map if there is one, for as long as the block runs.

    Raises:
        MismatchError: the map does not fit.
        NotFoundError, FormatError, UnsupportedError, CorruptError, StoreError: as `open_source`.
    """
    with contextlib.ExitStack() as files:
        source = open_source(path, files, mapped=mapped, shared=shared)
        yield source if key_map is None else import_function("_arrays.mapped_source:map_source")(source, key_map)


def read_index(path: str | os.PathLike[str]) -> Index:
    """Return the index of what stands at ``path``, of a run that of its latest step; no array is read.

    Raises:
        NotFoundError, FormatError, UnsupportedError, CorruptError, StoreError: as `open_source`.
    """
    path = kept(path)
    with asking(once=True), contextlib.ExitStack() as files:
        if detect(path) is Form.GZIP:  # opening it would make every array and text
            return cast("Index", import_function("_wire.msgpack_source:index_records")(list_headers(path).root))
        return stream_source(path, files).index


def read_checkpoint_index(path: Path) -> bytes | None:
    """Return the bytes of the index of the checkpoint at ``path``; None where something else is there, or nothing.

    Raises:
        TreeringError: as `open_source`.
    """
    if detect(path) is not Form.CHECKPOINT:
        return None
    with OpenFolder(path) as folder:
        return folder.read_index()


def list_headers(path: str | os.PathLike[str]) -> Listing:
    """Return what the headers of what stands at ``path`` say; raises as `open_source` does."""
    return cast("Listing", _call("listing", path))


def verify_bytes(path: str | os.PathLike[str], progress: Progress | None) -> Verification:
    """Read and check every byte of what stands at ``path``; damage is a finding.

    Raises:
        NotFoundError, FormatError, UnsupportedError: as ``detect`` says.
        StoreError: the system refuses.
    """
    return cast("Verification", _call("verify", path, progress))


def is_run(path: str | os.PathLike[str]) -> bool:
    """Tell whether a run stands at ``path``; raises as ``detect`` does."""
    return detect(path) is Form.RUN


def _call(task: str, path: str | os.PathLike[str], *given: Any, **named: Any) -> Any:
    """Call the function of the form at ``path``; where a run has none, that of a checkpoint on its latest step.

    Args:
        task: the name of the function's column.
        path: what is read.
        given: passed to the function.
        named: passed to the function.
    """
    path = kept(path)
    with asking(once=True):
        form = detect(path)
        # What a save replaces while it is opened is looked at again.
        with asking(once=form not in _REPLACED):
            if function := getattr(_FORMS[form] if isinstance(form, Form) else _FOREIGN, task):
                return import_function(function)(path, *given, **named)
            read = import_function(getattr(_FORMS[Form.CHECKPOINT], task))
            return import_function("_runs.steps:of_latest")(path, lambda step: read(step, *given, **named))
