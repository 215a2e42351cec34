"""What folders of other programs are that treering does not read as a whole, told by the names in them.

Which names these programs write: ``save_pretrained`` of transformers, diffusers and PEFT, the cache of the Hugging Face
hub, and ``flax.training.checkpoints``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from treering._printable import shorten
from treering._store.resolve import is_folder, is_seen, root_of

READ_HERE: Final = (
    "treering reads its checkpoints, leaves directories, safetensors, Hugging Face folders, the checkpoints of Orbax, "
    "Levanter and jax, msgpack, also in gzip form, npz and npy"
)
"""The forms that are read, for people."""

_LISTED: Final = 1024
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
    """Say what form of others a folder has, by the names in it; None where they say nothing.

    Example:
        >>> import pathlib, tempfile
        >>> step = pathlib.Path(tempfile.mkdtemp())
        >>> (step / "adapter_model.safetensors").touch()
        >>> other_folder(step).what, other_folder(step).hint
        ('a PEFT adapter', "pass the path of the file 'adapter_model.safetensors' in it")
    """
    if (other := name_folder(place)) is not None:
        return OtherFolder(other, _ITEMS_LOST if other == FOLDER_NAMES["_METADATA"] else READ_HERE)
    names = sorted(itertools.islice(root_of(place).names(place), _LISTED))
    for pattern, what, advise in _BY_PATTERN:
        found = [name for name in names if pattern.fullmatch(name)]
        if found and (hint := advise(place, found)) is not None:
            return OtherFolder(what, hint)
    return None


def name_folder(place: Path) -> str | None:
    """Say what a folder is that one name in it tells; None where there is no such name.

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
    names = sorted(itertools.islice(root_of(snapshots).names(snapshots), _LISTED))
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
