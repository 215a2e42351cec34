"""What a caller of ``treering.save`` or ``save_async`` asks for: one value, checked before the tree is looked at."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import ml_dtypes
import numpy as np

from treering import __version__
from treering._arrays.host import with_python_numbers
from treering._arrays.jobs import Progress
from treering._arrays.outgoing import WHOLE, SavedPart
from treering._codec.documents import check_json
from treering._printable import kind_of
from treering._store.resolve import absolute, kept, located, new_file_path, new_folder_path, require_path
from treering._values.arguments import FILE_SUFFIXES, OTHER_FORMS, require_flags, require_one_of, timeout_seconds
from treering._view.progress import reporter
from treering.errors import UnsupportedError

T = TypeVar("T")

HostLocal: TypeAlias = Literal["first", "equal"]
"""Leaves that each process holds alone come from process 0: as they are, or only if all others have the same."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Increment:
    """The older checkpoints whose files a save may share."""

    find: Callable[[], Iterable[Path]]
    """Returns them when the save is written, the one to prefer first."""
    required: bool = True
    """Whether it is an error that none is there, or that it cannot be read."""
    full_every: int | None = None
    """How many saves in a row may share files, the first one counted, which shares none; None for any number."""
    note: Callable[[Path], object] = lambda _: None
    """Called with the path when the save is committed."""

    @classmethod
    def of(cls, base: str | os.PathLike[str]) -> Increment:
        """Return what the argument ``base`` says.

        Raises:
            UnsupportedError: it cannot be the path of a folder.
        """
        if not isinstance(base, str | os.PathLike):
            raise UnsupportedError(f"base is {kind_of(base)}, and must be a path: a str or os.PathLike")
        require_path(base)
        if os.fspath(base).lower().endswith(FILE_SUFFIXES):
            what = f"base is {os.fspath(base)!r}, a single file, which is written as a whole"
            raise UnsupportedError(what, hint="save to a folder, and pass that; files of a folder can be shared")
        place = absolute(located(kept(base)))
        return cls(find=lambda: (place,))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """What a save goes by; ``treering.save`` says what each option means."""

    path: Path
    """Where to."""
    shown: str
    """The path as the caller wrote it."""
    metadata: Any
    """As given: it is checked together with the tree, because only process 0 may have been given any."""
    overwrite: bool
    """Whether what is there may be replaced."""
    progress: Progress | None
    """Called with the bytes that are done."""
    together: bool
    """Whether all processes of the job save it, if there are any others."""
    host_local: HostLocal
    """Where leaves come from that each process holds alone."""
    timeout: float
    """Seconds to wait at one point for other processes."""
    max_file_size: int | str | None = None
    """How large a file of a Hugging Face folder may be."""
    states: tuple[str, ...] = ()
    """Keys of states that have to be the same on all processes."""
    part: SavedPart = WHOLE
    """What of the tree is saved, and what is cast."""
    increment: Increment | None = None
    """The older checkpoints whose files it may share; None where each save writes everything."""

    @classmethod
    def of(
        cls,
        path: str | os.PathLike[str],
        *,
        metadata: Mapping[str, Any] | None,
        overwrite: bool,
        progress: Progress | bool | None,
        processes: Literal["all", "this"] = "all",
        host_local: HostLocal = "first",
        timeout: float | None,
        max_file_size: int | str | None = None,
        only: str | Sequence[str] | None = None,
        dtype: object = None,
        suffixes: tuple[str, ...] = FILE_SUFFIXES,
        base: str | os.PathLike[str] | None = None,
    ) -> SaveOptions:
        """Return what the arguments of ``treering.save`` say; paths with one of ``suffixes`` become a file.

        Raises:
            UnsupportedError: one of them has no meaning.
        """
        require_path(path)
        require_flags(overwrite=overwrite)
        seconds = timeout_seconds(timeout)
        require_one_of("processes", processes, ("all", "this"))
        require_one_of("host_local", host_local, ("first", "equal"))
        is_file = isinstance(path, str) and Path(path).suffix.lower() in suffixes
        place = new_file_path(path) if is_file else new_folder_path(path)  # a folder's may end in a separator
        if (suffix := place.suffix.lower()) in OTHER_FORMS.difference(suffixes):
            who, instead = ("treering.save", "treering.export does; ") if suffix == ".npz" else ("treering", "")
            *others, last = filter(None, suffixes)
            files = f"{', '.join(others)} and {last} become one file"
            hint = f"{instead}a name without it becomes a folder; {files}"
            raise UnsupportedError(f"{os.fspath(path)!r}: {who} writes no {suffix} files", hint=hint)
        if base is not None and suffix in suffixes:
            what = f"{os.fspath(path)!r} is a single file, which shares nothing with base={os.fspath(base)!r}"
            raise UnsupportedError(what, hint="a path without that suffix becomes a folder, whose files are shared")
        return cls(
            path=located(kept(place)),
            shown=os.fspath(path),
            metadata=metadata,
            overwrite=overwrite,
            progress=reporter(progress, "saving"),
            together=processes == "all" and suffix not in FILE_SUFFIXES,
            host_local=host_local,
            timeout=seconds,
            max_file_size=max_file_size,
            part=SavedPart.of(only, dtype),
            increment=None if base is None else Increment.of(base),
        )

    @property
    def compares_local(self) -> bool:
        """Whether leaves that each process holds alone are compared: all, or those of ``states``."""
        return self.host_local == "equal" or bool(self.states)

    def python_metadata(self) -> dict[str, Any]:
        """Return the metadata, with Python's numbers in it.

        Raises:
            UnsupportedError: it is no dict.
        """
        if not isinstance(self.metadata, Mapping | None):
            raise UnsupportedError(f"metadata is {kind_of(self.metadata)}, not a dict of JSON")
        return with_python_numbers(self.metadata or {})

    def json_metadata(self) -> dict[str, Any]:
        """Return the metadata as it is written.

        Raises:
            UnsupportedError: it is no dict of JSON.
        """
        metadata = self.python_metadata()
        check_json(metadata, "metadata")
        return metadata

    def snapshot(self) -> SaveOptions:
        """Return the same with metadata that nobody changes any more.

        Raises:
            UnsupportedError: the metadata is no dict of JSON.
        """
        return dataclasses.replace(self, metadata=copy.deepcopy(self.json_metadata()))


def require_value(value: T | BaseException) -> T:
    """Return a value, or raise why there is none."""
    if isinstance(value, BaseException):
        raise value
    return value


def versions() -> dict[str, str]:
    """Return who writes, with what, and when: nothing of the machine or its user."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found = {"by": f"treering {__version__}", "at": now, "python": platform.python_version()}
    # From the modules: importlib.metadata would read files, in the middle of a save.
    return found | {"jax": jax.__version__, "numpy": np.__version__, "ml_dtypes": ml_dtypes.__version__}
