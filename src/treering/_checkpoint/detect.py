"""What a path holds, told by what is there: a form of ours, one of somebody else, or a folder of another kind."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib
import itertools
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from treering._codec.compression import GZIP_MAGIC, unzip_first
from treering._codec.documents import FIRST_BYTES, describe_text
from treering._printable import kind_of, shorten
from treering._store.api import asking, remembered
from treering._store.open_folder import find_index_at
from treering._store.resolve import (
    absolute,
    find_at,
    is_folder,
    is_seen,
    located,
    names_at,
    open_file,
    places_at,
    refuse_linked,
    resolved,
    store_at,
)
from treering._values.checkpoint_names import RUN_DOCUMENT, step_of_name
from treering._values.human import near
from treering.errors import (
    ExistsError,
    FormatError,
    NotFoundError,
    PermissionDeniedError,
    StoreError,
    TreeringError,
    UnsupportedError,
)

_FORMS: Final = (
    "its checkpoints, leaves directories, safetensors, Hugging Face folders, the checkpoints of Orbax, Levanter and "
    "jax, msgpack, also in gzip form, npz and npy"
)
READ_HERE: Final = f"treering reads {_FORMS}"
"""The forms that are read, for people."""

_WEIGHTS: Final = ("model.safetensors", "model.safetensors.index.json")
_NAMES_LISTED: Final = 1024
_LONGEST_NAME: Final = 100
FOLDER_NAMES: Final = {
    **dict.fromkeys(("_CHECKPOINT_METADATA", "_METADATA", "commit_success.txt"), "an Orbax checkpoint"),
    "manifest.ocdbt": "an OCDBT database without the documents of Orbax or Levanter (perhaps an unfinished save)",
    ".zgroup": "a zarr group",
    ".zarray": "a zarr array",
    "zarr.json": "zarr",
    "model.safetensors.index.json": "a folder of safetensors files",
    "model.safetensors": "a folder with a safetensors file",
    "pytorch_model.bin": "a PyTorch checkpoint",
    **dict.fromkeys(("tensorstore_index.json", ".treering"), "a leaves directory"),
    "pytreedef.json": "a checkpoint of jax",
}
"""What a folder is that has a file of this name."""
_ITEMS_LOST: Final = (
    "none of its items has the _METADATA that says which arrays there are: restore it with Orbax, or use another copy"
)
_SNAPSHOT: Final = "pass the path of a snapshot of a model in it, models--ORGANISATION--NAME/snapshots/REVISION"


class OtherFolder(NamedTuple):
    """A folder that treering does not read as a whole."""

    what: str
    """What it is."""
    hint: str
    """What to do."""


def other_folder(place: Path) -> OtherFolder | None:
    """Detect a folder of another program by the names in it; None where they say nothing.

    Example:
        >>> import pathlib, tempfile
        >>> step = pathlib.Path(tempfile.mkdtemp())
        >>> (step / "adapter_model.safetensors").touch()
        >>> other_folder(step).what, other_folder(step).hint
        ('a PEFT adapter', "pass the path of the file 'adapter_model.safetensors' in it")
    """
    if (other := name_folder(place)) is not None:
        return OtherFolder(other, _ITEMS_LOST if other == FOLDER_NAMES["_METADATA"] else READ_HERE)
    names = sorted(names_at(place, _NAMES_LISTED))
    for pattern, what, advise in _BY_PATTERN:
        found = [name for name in names if pattern.fullmatch(name)]
        if found and (hint := advise(place, found)) is not None:
            return OtherFolder(what, hint)
    return None


def name_folder(place: Path) -> str | None:
    """Detect what a folder is by one name in it; None where there is no such name.

    Example:
        >>> import pathlib, tempfile
        >>> step = pathlib.Path(tempfile.mkdtemp())
        >>> (step / "_CHECKPOINT_METADATA").touch()
        >>> name_folder(step)
        'an Orbax checkpoint'
    """
    return next((other for name, other in FOLDER_NAMES.items() if is_seen(place / name)), None)


def _pass_file(_: Path, found: list[str]) -> str | None:
    tensors = [name for name in found if not name.endswith("config.json")]
    shown = f"the file {shorten(tensors[-1], _LONGEST_NAME)!r} in it" if tensors else "a file of arrays in it"
    return f"pass the path of {shown}"


def _pass_checkpoint(place: Path, found: list[str]) -> str | None:
    files = [name for name in found if not is_folder(place / name)]
    latest = max(files, key=lambda name: int(name.rpartition("_")[2]), default=None)
    return latest and f"pass the path of one, such as {shorten(latest, _LONGEST_NAME)!r}"


def _pass_snapshot(place: Path, found: list[str]) -> str | None:
    snapshots = place / found[0]
    names = sorted(names_at(snapshots, _NAMES_LISTED))
    if not names or not any(is_seen(place / name) for name in ("blobs", "refs")):
        return None
    return f"pass the path of a snapshot, such as 'snapshots/{shorten(names[-1], _LONGEST_NAME)}' in it"


# In their order: what is more than one of them is the first. Data files of our removed checkpoints are none of them.
_BY_PATTERN: Final[tuple[tuple[re.Pattern[str], str, Callable[[Path, list[str]], str | None]], ...]] = (
    (re.compile(r"adapter_(config\.json|model\.safetensors)"), "a PEFT adapter", _pass_file),
    (
        re.compile(r"model_index\.json"),
        "a pipeline of diffusers",
        lambda *_: "pass the path of a model in it, such as 'unet/diffusion_pytorch_model.safetensors'",
    ),
    (
        re.compile(r".*\.safetensors\.index\.\w+\.json|model\.\w+\.safetensors"),
        "a variant of a Hugging Face model",
        _pass_file,
    ),
    (
        re.compile(r"(?!data-[0-9a-f]{16}-).*\.safetensors"),
        "a folder with safetensors files of other names than a model's",
        _pass_file,
    ),
    (re.compile(r"snapshots"), "a model in the cache of the Hugging Face hub", _pass_snapshot),
    (re.compile(r"(models|datasets|spaces)--.+"), "a cache of the Hugging Face hub", lambda *_: _SNAPSHOT),
    (re.compile(r"checkpoint_[0-9]{1,18}"), "a folder of flax's checkpoints", _pass_checkpoint),
)


_FILE_SUFFIXES: Final = frozenset({".msgpack", ".safetensors", ".gz"})
_LOOKED_AT: Final = 64
_HEADER_PREFIX: Final = 8
_ASCII: Final = 128

# First bytes of msgpack's maps and arrays, and of the extensions that are arrays here. Any other byte is a bare number
# or text, and many a file that is no msgpack at all begins with one.
_HOLDERS: Final = frozenset([*range(0x80, 0xA0), *range(0xC7, 0xCA), *range(0xD4, 0xD9), *range(0xDC, 0xE0)])
_ZIPPED_BYTES: Final = 4096

# First bytes that each form's specification fixes; no msgpack file that holds anything begins with one of them.
EQUINOX: Final = "it is a file of equinox, whose arrays have no names"
"""What is wrong with a file that ``tree_serialise_leaves`` wrote."""
READ_EQUINOX: Final = "read it with equinox.tree_deserialise_leaves into the model, and save that with treering"
"""What to do with such a file."""
_INDEX_ITSELF: Final = "the index of a checkpoint"
_OTHER_FILES: Final = {
    "a zip archive without arrays of numpy (perhaps a PyTorch checkpoint)": (b"PK\x03\x04",),
    "an HDF5 file": (b"\x89HDF\r\n",),
    "a zstd file": (b"\x28\xb5\x2f\xfd",),
    "a pickle": (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"),
    "a GGUF file": (b"GGUF",),
    _INDEX_ITSELF: (b'{"treering"',),
    "a JSON text": (b'{"', b"{\n"),
}
# What makes a folder a leaves directory: the index, or what a save without one left.
_LEAVES: Final = ("tensorstore_index.json", ".treering")
_ONE_FORM: Final = "a folder holds one form alone"


class ForeignReader(NamedTuple):
    """A module that reads a format of another program, and what in a path calls for it."""

    form: str
    """What listings and messages call the format."""
    module: str
    """Its ``recognise(place)`` returns the version that it sees there, or None; ``open_foreign(place, files)`` opens
    it as a ``ForeignTree``."""
    magics: tuple[bytes, ...] = ()
    """First bytes of a file."""
    names: tuple[str, ...] = ()
    """Names in a folder, of which one is enough."""
    suffixes: tuple[str, ...] = ()
    """How a name in a folder may end instead; the first names are looked at. Every name ends with an empty one."""


_READERS: Final = (
    ForeignReader("npz", "treering._foreign.numpy_files", magics=(b"PK\x03\x04", b"PK\x05\x06")),
    ForeignReader("npy", "treering._foreign.numpy_files", magics=(b"\x93NUMPY",)),
    ForeignReader(
        "hf",
        "treering._foreign.huggingface",
        magics=(b"{",),
        names=("model.safetensors.index.json", "model.safetensors"),
        suffixes=(".safetensors.index.json",),
    ),
    ForeignReader("jax pytree", "treering._foreign.jax_pytree", names=("pytreedef.json",)),
    # A root of steps has none of these names, but folders with a number at the end.
    ForeignReader("levanter", "treering._foreign.levanter", names=("metadata.json",), suffixes=tuple("0123456789")),
    # Last: the names of a manager's steps may be any, so that it looks at every folder that is nothing else.
    ForeignReader("orbax", "treering._foreign.orbax", suffixes=("",)),
)
_PLUG_INS: Final = "treering.readers"
"""The group of entry points of readers in other packages; each names a module as `ForeignReader` does."""


class Form(enum.Enum):
    """The forms that this version reads."""

    CHECKPOINT = "checkpoint"
    """A folder with a ``treering.json``."""
    LEAVES = "leaves"
    """A folder with a ``tensorstore_index.json``, ours or another writer's; one with a ``treering.json`` is none."""
    RUN = "run"
    """A folder of steps, or with a ``run.json`` of ours; one with a ``treering.json`` is none."""
    SAFETENSORS = "safetensors"
    """One safetensors file, ours or another writer's."""
    MSGPACK = "msgpack"
    """One file on flax's wire."""
    GZIP = "msgpack in gzip"
    """The same in gzip form."""


@dataclasses.dataclass(frozen=True, slots=True)
class ForeignForm:
    """A form that a module reads which knows the format of another program."""

    value: str
    """What listings and messages call it."""
    module: str
    """Reads it."""
    version: str
    """Which version of the format was seen."""


def detect(path: str | os.PathLike[str]) -> Form | ForeignForm:
    r"""Tell which form is at ``path``. The content decides; its name does only where the content says nothing.

    Raises:
        NotFoundError: nothing is there, or a folder of some other well-known form. Every other folder is taken for a
            checkpoint, which it is if it has an index; one with arrays and no index of any kind for leaves.
        FormatError: a file of some other form, which the message names where it is well known.
        UnsupportedError: a URL, or no path at all.
        StoreError: not readable.

    Example:
        >>> import pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp(), "a.bin")
        >>> _ = file.write_bytes(b"\x81\xa1a\x01")
        >>> detect(file)
        <Form.MSGPACK: 'msgpack'>
    """
    given: object = path
    shown = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(shown, str) or not shown:
        what = "''" if shown == "" else kind_of(shown)  # a tree may be of any size
        raise UnsupportedError(f"{what} is not the name of a checkpoint or file", hint="pass the path of one, as text")
    place = located(path)
    # First, because in a bucket each look is a request.
    with asking(once=True):
        return remembered((detect, place), functools.partial(_detect, place, shown))


def _detect(place: Path, shown: str) -> Form | ForeignForm:
    is_file = place.suffix.lower() in _FILE_SUFFIXES  # by its name
    if not is_file and find_index_at(place, follow=False):
        return Form.CHECKPOINT
    if is_folder(place):
        return Form.CHECKPOINT if is_file and find_index_at(place, follow=False) else _folder(place)
    try:
        return _detect_file(place, shown)
    except FormatError:
        if (found := _find_plug_in(place)) is None:
            raise
        return found


def _detect_file(place: Path, shown: str) -> Form | ForeignForm:
    try:
        with open_file(place) as file:
            size = file.size
            first = file.read(0, min(size, FIRST_BYTES))
            zipped = file.read(0, min(size, _ZIPPED_BYTES)) if first[:2] == GZIP_MAGIC else None
    except NotFoundError as error:
        error.hint = _instead_of(place) or error.hint
        raise
    if zipped is not None:
        if ".msgpack" not in place.name and (start := unzip_first(zipped)):
            _require_holder(shown, start)
        return Form.GZIP
    likely = [reader for reader in _READERS if first.startswith(reader.magics or b"?")]
    return find_foreign(place, likely) or _file(shown, first, size)


def find_foreign(place: Path, readers: Iterable[ForeignReader]) -> ForeignForm | None:
    """Return the foreign form that the first of these readers sees at ``place``; None where none does."""
    for reader in readers:
        version = importlib.import_module(reader.module).recognise(place)
        if version is not None:
            return ForeignForm(reader.form, reader.module, version)
    return None


def find_foreign_folder(place: Path) -> ForeignForm | None:
    """Return the foreign form of a folder, as `find_foreign`; only those readers look that a name in it calls for."""
    return find_foreign(place, readers_in(place))


def readers_in(folder: Path) -> Iterator[ForeignReader]:
    """Yield the readers that a name in a folder calls for; the names are listed once."""
    listed = set(names_at(folder, _NAMES_LISTED))
    # A folder that cannot be listed may hold files all the same, and one with more names than were listed others.
    is_listed = 0 < len(listed) < _NAMES_LISTED
    for reader in _READERS:
        named = listed.intersection(reader.names) or [name for name in listed if name.endswith(reader.suffixes)]
        if named or (not is_listed and any(is_seen(folder / name) for name in reader.names)):
            yield reader


def _find_plug_in(place: Path) -> ForeignForm | None:
    """Return the form that a reader of another package sees at ``place``; asked only where none of ours sees one.

    Raises:
        UnsupportedError: such a reader fails.
        TreeringError: it says what is wrong.
    """
    from importlib.metadata import entry_points

    for entry in sorted(entry_points(group=_PLUG_INS), key=lambda entry: entry.name):
        try:
            version = importlib.import_module(entry.module).recognise(place)
        except TreeringError:
            raise
        except Exception as error:
            what = f"the reader {entry.name!r}, {entry.value}, failed at {os.fspath(place)!r}: {error!r}"
            raise UnsupportedError(what, hint="fix it, or uninstall its package") from error
        if version is not None:
            return ForeignForm(entry.name, entry.module, version)
    return None


def _leads_on(place: Path) -> bool:
    with contextlib.suppress(StoreError):
        return is_folder(place)
    return False


def _file(shown: str, first: bytes, size: int) -> Form:
    # The length of a JSON header, little-endian in eight bytes, then that header.
    is_named, next_byte = shown.endswith(".safetensors"), first[_HEADER_PREFIX : _HEADER_PREFIX + 1]
    if next_byte == b"{" and first[6:8] == b"\0\0":
        return Form.SAFETENSORS
    is_text = describe_text(first) is not None and first[0] < _ASCII
    if is_named and next_byte in (b"", b"{") and not (is_text and size >= _HEADER_PREFIX):
        # Damaged, and its reader says how.
        return Form.SAFETENSORS
    if shown.endswith(".eqx"):
        raise FormatError(f"{shown!r} cannot be read: {EQUINOX}", hint=READ_EQUINOX)
    for other, magics in _OTHER_FILES.items():
        if first.startswith(magics):
            is_index = other == _INDEX_ITSELF or located(shown).name in _LEAVES
            hint = "pass the folder that it is in" if is_index else READ_HERE
            raise FormatError(f"{shown!r} is {other}, not msgpack", hint=hint)
    is_beyond = int.from_bytes(first[:_HEADER_PREFIX], "little") > size - _HEADER_PREFIX
    if is_named and not (is_text or (is_beyond and first[0] in _HOLDERS)):
        return Form.SAFETENSORS
    # What is called .msgpack and is none is damaged, and its reader says how. A number is one byte, more are a text.
    if not shown.endswith(".msgpack") or (is_text and size > 1):
        _require_holder(shown, first)
    return Form.MSGPACK


def _require_holder(shown: str, first: bytes) -> None:
    if not first or first[0] not in _HOLDERS:
        bare = "a bare value is msgpack only in a file with the suffix .msgpack"
        hint = describe_text(first) or bare if first else "it is empty"
        raise FormatError(f"{shown!r} is in no form that treering reads ({_FORMS})", hint=hint)


def _instead_of(place: Path) -> str | None:
    """Return a hint for a path that leads nowhere: the name that was probably meant, or the folder that lacks it."""
    if place.parts[:1] and place.parts[0].startswith("~"):
        return "'~' is not expanded here; os.path.expanduser does it"
    breaks = (pair for pair in itertools.pairwise([place, *place.parents]) if _leads_on(pair[1]))
    missing, folder = next(breaks, (place, place))
    by_request = store_at(folder).asks_by_request
    if not by_request and is_seen(missing) and find_at(missing) is None:
        return f"{os.fspath(missing)!r} is a link to {os.fspath(resolved(missing))!r}, which is not there"
    if close := near(missing.name, names_at(folder)):
        return f"did you mean {os.fspath(folder / close)!r}?"
    # In a bucket any folder may be there, and to ask would be one more request.
    is_told = missing != folder and not by_request
    return f"the folder {os.fspath(resolved(folder))!r} has nothing named {missing.name!r}" if is_told else None


def _folder(place: Path) -> Form | ForeignForm:
    """Return the form of a folder that has no index of a checkpoint; where it has none at all, its reader says so."""
    # Where each look is a request, only what a store of ours would have is looked for.
    searches = not store_at(place).asks_by_request
    if any(find_at(place / name, follow=False) for name in (_LEAVES if searches else _LEAVES[:1])):
        _refuse_beside_leaves(place)
        return Form.LEAVES
    names = names_at(place, _NAMES_LISTED) if searches else []
    is_listed = 0 < len(names) < _NAMES_LISTED  # else a run may be there all the same
    may_be_run = not is_listed or RUN_DOCUMENT in names or {*map(step_of_name, names)} != {None}
    is_run = may_be_run and bool(import_function("_runs.folder:has_run")(place))
    if is_run and (not searches or is_seen(place / RUN_DOCUMENT)):
        return Form.RUN
    foreign = find_foreign_folder(place)
    if is_run and foreign is not None:
        hint = "move the steps, or what lies beside them, to a folder of its own"
        raise FormatError(f"{os.fspath(place)!r} holds steps and the form {foreign.value}, and {_ONE_FORM}", hint=hint)
    if is_run or (foreign := foreign or _find_plug_in(place)) is not None:
        return foreign or Form.RUN
    has_arrays = searches and holds_arrays(place)
    above = absolute(place).parents if searches else ()
    around = next((one for one in above if is_seen(one / _LEAVES[0])), None)
    if around is not None and (has_arrays or is_seen(place / ".zarray")):
        hint = "pass that one; a glob or at= selects this part"
        raise NotFoundError(f"{os.fspath(place)!r} lies inside of a leaves directory, {os.fspath(around)!r}", hint=hint)
    if (other := other_folder(place)) is not None:
        raise NotFoundError(f"there is no checkpoint in {os.fspath(place)!r}: it is {other.what}", hint=other.hint)
    return Form.LEAVES if has_arrays else Form.CHECKPOINT


def import_function(name: str) -> Any:
    """Return the function ``module:name`` of a form, whose module is imported when something may be of that form."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(f"treering.{module}"), function)


def holds_arrays(place: Path) -> bool:
    """Tell whether arrays lie a few levels down, as in leaves whose index was lost; a short look, not a search."""
    waiting, left = deque([place]), _LOOKED_AT
    while waiting and left:
        left -= 1
        here = waiting.popleft()
        below = [here / name for name in places_at(here, _LOOKED_AT)]
        if any(is_seen(path / ".zarray") for path in below):
            return True
        waiting.extend(below)
    return False


def _refuse_beside_leaves(place: Path) -> None:
    """Refuse a leaves directory that holds a run or weights too; leaves may have such names, and are folders then.

    Raises:
        FormatError: it does. What reads one of the two by its name reads it still.
    """
    names = names_at(place)
    others = dict.fromkeys(_WEIGHTS, "a Hugging Face folder") | {RUN_DOCUMENT: "a run"}
    found = [others[name] for name in names if name in others and (at := find_at(place / name)) and at.is_file]
    if not found and any(step_of_name(name) is not None and find_index_at(place / name) for name in names):
        found = ["a run"]
    if found:
        hint = "treering.leaves and treering.Run read what is theirs; move one of the two to a folder of its own"
        raise FormatError(f"{os.fspath(place)!r} is a leaves directory and {found[0]}, and {_ONE_FORM}", hint=hint)


def refuse_other_form(place: Path, own: str) -> None:
    """Refuse to write through a link in the place of a step, or into a folder of another form, which would be hidden.

    Args:
        place: the folder, which need not be there.
        own: the form that is written; its writer judges what there is of it, and a checkpoint.

    Raises:
        LinkRefusedError: a link lies there.
        ExistsError: the folder is of another form that treering reads.
        FormatError: it is of two forms already.
        StoreError: the store refuses.
    """
    refuse_linked(place)
    try:
        is_ours = not is_folder(place) or find_index_at(place, follow=False)
        found = Form.CHECKPOINT if is_ours else _folder(place)
    except (NotFoundError, PermissionDeniedError):
        return  # of a form that treering does not read; or nobody may look, only write
    if found.value not in (own, Form.CHECKPOINT.value):
        what = {"run": "a run", "leaves": "a leaves directory"}.get(found.value, f"of the form {found.value}")
        raise ExistsError(f"{os.fspath(place)!r} is {what}, and {_ONE_FORM}", hint="save to another path")
