"""The forms that treering reads and writes, one row each: what opens, lists, verifies or writes it, and what is lost.

The functions are named here, not imported: a program that reads one form imports the code of that form alone, and what
looks at headers needs neither jax nor numpy. A new form is one module with these functions, and one row.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, cast

from treering._checkpoint.detect import Form, detect, import_function
from treering._format.index import LeafType, Token
from treering._format.safetensors import why_not_stored
from treering._format.structure import containers_of, iter_runs
from treering._printable import list_lines
from treering._store.api import asking
from treering._store.open_folder import OpenFolder
from treering._store.resolve import kept, require_path
from treering._values.human import join_first
from treering._values.keys import GlobSet, join_key, quoted_key, split_key
from treering.errors import UnsupportedError

if TYPE_CHECKING:
    from treering._arrays.source import Source
    from treering._checkpoint.source import SharedIndex
    from treering._format.findings import Verification
    from treering._format.index import Index
    from treering._format.listing import Listing
    from treering._format.selection import Selection
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
_MSGPACK: Final = FormFunctions("_foreign.msgpack_source:open_msgpack", "_inspect.inspect:list_msgpack_file",
                                "_inspect.verify:verify_msgpack")
_READERS: Final[Mapping[Form, FormFunctions]] = {
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
# These take the form first, as `detect` returns it.
_FOREIGN: Final = FormFunctions("_foreign.grid_arrays:open_source", "_foreign.foreign_tree:list_tree",
                                "_foreign.grid_arrays:verify_tree")
# fmt: on


Where: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
"""A path, or several whose trees lie over each other, the lowest first."""


def paths_of(path: Where) -> list[str | os.PathLike[str]]:
    """Return the paths that an argument names, each of which leads to the same account to the end of a call.

    Raises:
        UnsupportedError: it is something else, or an empty list.

    Example:
        >>> paths_of("ckpt"), paths_of(["base", "adapter"])
        (['ckpt'], ['base', 'adapter'])
    """
    paths: list[Any] = list(path) if isinstance(path, list | tuple) else [path]
    if not paths:
        raise UnsupportedError("the first argument is an empty list", hint="pass a path, or a list of one path or more")
    for one in paths:
        require_path(one)
    return [kept(one) for one in paths]


def open_source(path: Where, files: contextlib.ExitStack, *, mapped: bool, shared: SharedIndex | None = None) -> Source:
    """Open what is at ``path`` to read leaves; it stays open until ``files`` closes it.

    Args:
        path: the checkpoint or file, or several.
        files: closes it.
        mapped: whether arrays may be maps of the files.
        shared: the index of the checkpoint at ``path``, if process 0 read it for all.

    Raises:
        NotFoundError, FormatError, UnsupportedError: as ``detect`` says.
        CorruptError: its headers contradict themselves.
        StoreError: the system refuses.
    """
    if isinstance(path, list | tuple):
        layers = [open_source(one, files, mapped=mapped) for one in path]
        return cast("Source", import_function("_arrays.derived_source:lay_over")(layers, list(map(os.fspath, path))))
    path = cast("str | os.PathLike[str]", path)
    if shared is not None:
        read = import_function(_READERS[Form.CHECKPOINT].source)
        return cast("Source", read(path, files, mapped=mapped, shared=shared))
    return cast("Source", _call("source", path, files, mapped=mapped))


def stream_source(path: Where, files: contextlib.ExitStack) -> Source:
    """Open what is at ``path`` to read it a piece at a time where that can be; raises as `open_source` does."""
    if isinstance(path, list | tuple):
        layers = [stream_source(one, files) for one in path]
        return cast("Source", import_function("_arrays.derived_source:lay_over")(layers, list(map(os.fspath, path))))
    path = kept(cast("str | os.PathLike[str]", path))
    with asking(once=True):
        if detect(path) is Form.MSGPACK:
            return cast("Source", import_function("_foreign.msgpack_source:stream_msgpack")(path, files))
        return open_source(path, files, mapped=False)


@contextlib.contextmanager
def read_source(
    path: Where, *, mapped: bool, key_map: KeyMap | None = None, shared: SharedIndex | None = None
) -> Iterator[Source]:
    """Open what is at ``path``, through a key map if there is one, for as long as the block runs.

    Raises:
        MismatchError: the map does not fit.
        NotFoundError, FormatError, UnsupportedError, CorruptError, StoreError: as `open_source`.
    """
    with contextlib.ExitStack() as files:
        source = open_source(path, files, mapped=mapped, shared=shared)
        yield source if key_map is None else import_function("_arrays.derived_source:map_source")(source, key_map)


def read_index(path: Where) -> Index:
    """Return the index of what is at ``path``, of a run that of its latest step; no array is read.

    Raises:
        NotFoundError, FormatError, UnsupportedError, CorruptError, StoreError: as `open_source`.
    """
    if isinstance(path, list | tuple):
        indexes = list(map(read_index, path))
        merged, _ = import_function("_arrays.derived_source:merge_indexes")(indexes, list(map(os.fspath, path)))
        return cast("Index", merged)
    path = kept(cast("str | os.PathLike[str]", path))
    with asking(once=True), contextlib.ExitStack() as files:
        if detect(path) is Form.GZIP:  # opening it would make every array and text
            return cast("Index", import_function("_foreign.msgpack_source:index_leaves")(list_headers(path).root)[0])
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
    """Return what the headers of what is at ``path`` say; raises as `open_source` does."""
    return cast("Listing", _call("listing", path))


def verify_bytes(path: str | os.PathLike[str], progress: Progress | None) -> Verification:
    """Read and check every byte of what is at ``path``; damage is a finding.

    Raises:
        NotFoundError, FormatError, UnsupportedError: as ``detect`` says.
        StoreError: the system refuses.
    """
    return cast("Verification", _call("verify", path, progress))


def is_run(path: str | os.PathLike[str]) -> bool:
    """Tell whether a run is at ``path``; raises as ``detect`` does."""
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
        with asking(once=False) if form in _REPLACED else contextlib.nullcontext():
            if not isinstance(form, Form):
                return import_function(getattr(_FOREIGN, task))(form, path, *given, **named)
            if function := getattr(_READERS[form], task):
                return import_function(function)(path, *given, **named)
            read = import_function(getattr(_READERS[Form.CHECKPOINT], task))
            return import_function("_runs.steps:of_latest")(path, lambda step: read(step, *given, **named))


# ---------------------------------------------------------------------------------------------------------- writing

_SHOWN: Final = 3
_KINDS: Final = {"key": "keys", "none": "none", "opaque": "objects"} | {
    **dict.fromkeys(("bool", "int", "float", "complex"), "scalars"),
    **dict.fromkeys(("str", "bytes", "bytearray"), "strings"),
}
LOSSES: Final[Mapping[str, str]] = {
    "arrays": "such arrays are left out",
    "items": "such items of a step are left out",
    "keys": "typed PRNG keys become arrays of uint32",
    "metadata": "such members of the metadata are left out",
    "names": "such leaves are left out",
    "none": "None is left out",
    "objects": "functions and other objects are left out",
    "scalars": "Python numbers are left out",
    "strings": "str and bytes are left out",
    "structure": "what the names of leaves do not say is left out",
}
"""The kinds of losses, and what happens where one is accepted."""

_KEPT: Final = frozenset({"keys", "metadata", "structure"})


class TargetWriter(NamedTuple):
    """A module that writes a form."""

    form: str
    """The name of the form."""
    module: str
    """Its ``find_losses(source, part, metadata)`` yields a ``Loss`` for all that the form cannot hold;
    ``write(source, part, save, watch)`` writes the rest, and returns the arrays and values that were written by their
    keys in the result, or None where the result has checksums of its own."""
    suffix: str = ""
    """How the path of a file ends; a folder has none."""
    steps: str = ""
    """A module that writes the steps of whole runs in this form, if it has any: its ``StepWriter(items)`` is as
    ``module``, and its ``find_conversions(save)`` returns what the steps that are there were converted from."""


_WRITERS: Final = (
    TargetWriter("treering", "treering._checkpoint.save_folder"),
    TargetWriter("safetensors", "treering._checkpoint.save_files", suffix=".safetensors"),
    TargetWriter("flax", "treering._checkpoint.save_msgpack", suffix=".msgpack"),
    TargetWriter("npz", "treering._foreign.write_npz", suffix=".npz"),
    TargetWriter("hf", "treering._foreign.write_huggingface"),
    TargetWriter("leaves", "treering._leaves.serialize"),
    TargetWriter("orbax", "treering._foreign.write_orbax", steps="treering._foreign.write_orbax"),
)
_PLUG_INS: Final = "treering.writers"
"""The group of entry points of writers in other packages; each names a module as `TargetWriter` does, whose ``SUFFIX``
is the suffix."""
FORMS: Final = tuple(writer.form for writer in _WRITERS)
"""The forms that can be written."""
SUFFIXES: Final = tuple(writer.suffix for writer in _WRITERS if writer.suffix)
"""How the paths of files end."""


class Loss(NamedTuple):
    """Something that a form cannot hold."""

    kind: str
    """One of ``LOSSES``."""
    name: str
    """Key text of the leaf or container, or the name of the member."""
    text: str
    """What it is, for people."""


def find_writer(path: Path, shown: str, to: str | None) -> TargetWriter:
    """Return what writes a form to a path.

    Raises:
        UnsupportedError: there is no such form, or the path is not one of it.
    """
    suffix = path.suffix.lower()
    usual = next((writer for writer in _WRITERS if writer.suffix == suffix), _WRITERS[0])
    found = usual if to is None else next((writer for writer in _WRITERS if writer.form == to), None)
    if found is None and (found := _find_plug_in(to)) is None:
        hint = f"use one of {', '.join(FORMS)}, or none: then the path's ending decides"
        raise UnsupportedError(f"to={to!r:.100} is not a form that can be written", hint=hint)
    if found.suffix != (suffix if suffix in (found.suffix, *SUFFIXES) else ""):
        hint = f"a path that ends in {', '.join(SUFFIXES)} becomes such a file, any other a folder"
        hint = hint if found in _WRITERS else f"its paths end in {found.suffix!r}"
        raise UnsupportedError(f"{shown!r} is not a path of the form {found.form}", hint=hint)
    return found


def _find_plug_in(form: str | None) -> TargetWriter | None:
    """Return what another package writes a form with; asked only where none of ours has that name."""
    from importlib.metadata import entry_points

    for entry in entry_points(group=_PLUG_INS, name=form or ""):
        return TargetWriter(entry.name, entry.module, getattr(importlib.import_module(entry.module), "SUFFIX", ""))
    return None


def accept_losses(form: str, losses: Sequence[Loss], lose: str | Sequence[str]) -> frozenset[Loss]:
    """Return the losses, all of which were accepted: by their kind, or by a glob over the keys of leaves.

    Raises:
        UnsupportedError: some were not; the message lists them.

    Example:
        >>> accept_losses("npz", [Loss("scalars", "a/b", "leaf 'a/b': an int")], ["strings"])
        Traceback (most recent call last):
            ...
        treering.errors.UnsupportedError: the form 'npz' cannot hold:
          leaf 'a/b': an int
        accept it by lose= with 'scalars' (Python numbers are left out), or globs over the keys of leaves
        >>> len(accept_losses("npz", [Loss("scalars", "a/b", "leaf 'a/b': an int")], "a"))
        1
    """
    names = [lose] if isinstance(lose, str) else list(lose)
    globs = GlobSet(name for name in names if name not in LOSSES)
    refused = [
        loss
        for loss in losses
        if loss.kind not in names and (loss.kind == "metadata" or not _is_matched(globs, loss.name))
    ]
    if refused:
        kinds = ", ".join(f"{kind!r} ({LOSSES[kind]})" for kind in sorted({loss.kind for loss in refused}))
        listed = list_lines([loss.text for loss in refused])
        what = f"accept it by lose= with {kinds}, or globs over the keys of leaves"
        raise UnsupportedError(f"the form {form!r} cannot hold:{listed}\n{what}")
    return frozenset(losses)


def left_out(losses: Iterable[Loss]) -> set[str]:
    """Return the keys of the leaves that are left out."""
    return {loss.name for loss in losses if loss.kind not in _KEPT}


def _is_matched(globs: GlobSet, key: str) -> bool:
    state = globs.start
    for part in split_key(key):
        if globs.accepted(state):
            break
        state = globs.step(state, part)
    return bool(globs.accepted(state))


# ----------------------------------------------------------------------------------------------- what forms cannot hold


def lost_members(metadata: Iterable[str]) -> Iterator[Loss]:
    """Yield a loss for each of these members of the metadata."""
    for name in metadata:
        yield Loss("metadata", name, f"the member {name!r:.200} of the metadata")


def lost_leaves(source: Source, part: Selection, refuse: Callable[[LeafType], str | None]) -> Iterator[Loss]:
    """Yield a loss for each leaf of a type that is refused, for the reason that ``refuse`` returns."""
    index = source.index
    reasons = list(map(refuse, index.types))
    for key, leaf in zip(part.keys, part.leaves, strict=True):
        number = index.leaf_types[leaf]
        if (why := reasons[number]) is not None:
            yield Loss(_KINDS.get(index.types[number].kind, "arrays"), key, f"leaf {quoted_key(key)}: {why}")


def key_texts(structure: Sequence[Token]) -> list[str]:
    """Return the key text of each leaf as its containers make it; the keys of a foreign tree may be other texts."""
    return [above + name for above, names in iter_runs(structure) for name in names]


def refuse_others(kind: LeafType, dtypes: Container[Any]) -> str | None:
    """Say what a leaf is that is no array of one of these dtypes; None where it is one."""
    if kind.kind in ("jax", "numpy", "numpy scalar"):
        return None if kind.dtype in dtypes else f"an array of {kind.dtype}"
    return "None" if kind.kind == "none" else why_not_stored(kind)


def lost_names(keys: Sequence[str], names: Sequence[str], is_odd: Callable[[str], object]) -> Iterator[Loss]:
    """Yield a loss for each leaf whose name a form cannot hold, or another leaf has."""
    known: dict[str, str] = {}
    for key, name in zip(keys, names, strict=True):
        if is_odd(name):
            yield Loss("names", key, f"leaf {quoted_key(key)}: {name!r:.200} is no name of a tensor")
        elif (other := known.setdefault(name, key)) is not key:
            yield Loss("names", key, f"leaf {quoted_key(key)}: {other!r:.200} has the name {name!r:.200} too")


def lost_containers(tokens: Sequence[Token], *, empty: bool = True, above: Sequence[str] = ()) -> Iterator[Loss]:
    """Yield a loss for what containers are more than the names of what is in them.

    Args:
        tokens: the structure.
        empty: whether an empty container is a loss.
        above: where the structure is in the tree.
    """
    for below, token in containers_of(tokens):
        key = join_key((*above, *below))
        where = f"at {key!r:.200}" if above or below else "at the root"
        if empty and not token.keys and below:
            yield Loss("structure", key, f"an empty {token.node} {where}: no name would stand for it")
        if token.static:
            fields = join_first([name for name, _ in token.static], _SHOWN)
            yield Loss("structure", key, f"the static fields {fields} of {token.class_name} {where}")
        if token.node == "dict" and (odd := [each for each in token.keys if type(each) is not str]):
            yield Loss("structure", key, f"the dict {where}: its key {odd[0]!r:.100} is no text")
