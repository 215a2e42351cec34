"""Where the leaves of a leaves directory lie: key texts and prefixes <-> folders.

A key whose parts are ordinary names lies at its own path, as other programs expect it. Any other part is escaped, so
that no key leads out of the directory, meets another's folder, or hides a file of the store.

Source: RFC 3986, section 2.1, for the form of the escapes.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable
from typing import Final

from treering._values.human import pluralize
from treering._values.keys import split_key
from treering.errors import CorruptError, UnsupportedError

# An empty part, and a bare array that has no prefix, need a name; no escape and no ordinary part looks like it.
_EMPTY: Final = "%-"
_LONGEST: Final = 255  # bytes of a name, on every file system in use

# What separates parts here or in another program's keys, what is no text, and what no terminal should be shown.
_UNSAFE: Final = r"./\\:\x00-\x1f\x7f-\x9f\ud800-\udfff"
_LOOKS_ESCAPED: Final = re.compile(r"%(?:-|[0-9A-F]{2})")
_NOT_ORDINARY: Final = re.compile(rf"[{_UNSAFE}]|%(?:-|[0-9A-F]{{2}})")
_ESCAPED_CHARACTERS: Final = re.compile(rf"[{_UNSAFE}%]")
_ESCAPES: Final = re.compile(r"(?:%[0-9A-F]{2})+")
# Key texts that may be no folder as they stand: an unsafe character, an escape of either kind, an empty part.
_NEEDS_A_LOOK: Final = re.compile(rf"[{_UNSAFE.replace('/', '')}%~]|//|\A/|/\Z|\A\Z")
_PREFIX_SEPARATORS: Final = re.compile(r"[./]")


def folder_of(prefix: str | None, key: str) -> str:
    """Return the folder of a leaf, relative to the directory: the prefix's parts and the key's, joined with ``/``.

    A bare array lies in the prefix's own folder, and in ``%-`` where there is no prefix.

    Args:
        prefix: as the user gave it; None and "" are no prefix.
        key: key text of the leaf.

    Raises:
        UnsupportedError: the prefix cannot be a folder, or a part takes more than 255 bytes when it is escaped.
        FormatError: ``key`` is no key text.

    Example:
        >>> folder_of(None, "params/dense/kernel"), folder_of("model", "layer.0/w")
        ('params/dense/kernel', 'model/layer%2E0/w')
        >>> folder_of(None, ""), folder_of("model", "")
        ('%-', 'model')
    """
    above = prefix_folder(prefix) if prefix else ""
    if (len(key) <= _LONGEST and key.isascii()) and not _NEEDS_A_LOOK.search(key):
        below = key
    else:
        parts = split_key(key)
        folders = [escape(part) for part in parts]
        for folder in folders:
            if len(folder) > _LONGEST or len(folder.encode()) > _LONGEST:
                raise UnsupportedError(
                    f"a part of the key is {pluralize(len(folder.encode()), 'bytes')} long as the name of a folder;"
                    f" {_LONGEST} is the maximum of file systems",
                    path=parts,
                    hint="shorten the key",
                )
        below = "/".join(folders)
    return f"{above}/{below}" if above and below else above or below or _EMPTY


@functools.lru_cache(maxsize=64)
def prefix_folder(prefix: str) -> str:
    """Return the folder of a prefix: its parts, split at ``.`` and ``/``, joined with ``/``.

    Raises:
        UnsupportedError: a part is empty, or has a character that would have to be escaped; nothing is escaped here,
            since other programs look for the prefix where it says.

    Example:
        >>> prefix_folder("model.ema"), prefix_folder("model/ema")
        ('model/ema', 'model/ema')
        >>> prefix_folder("../model")
        Traceback (most recent call last):
        ...
        treering.errors.UnsupportedError: the prefix '../model' is not a path of folders: it has an empty part
    """
    parts = _PREFIX_SEPARATORS.split(prefix)
    for part in parts:
        if not part:
            raise UnsupportedError(f"the prefix {prefix[:200]!r} is not a path of folders: it has an empty part")
        if _NOT_ORDINARY.search(part):
            raise UnsupportedError(
                f"the prefix {prefix[:200]!r} is not a path of folders: {part[:200]!r} is not a plain name",
                hint="use letters, digits, '_' and '-', with '.' or '/' between folders",
            )
        if len(part.encode()) > _LONGEST:
            raise UnsupportedError(f"a part of the prefix {prefix[:200]!r} is longer than {_LONGEST} bytes")
    return "/".join(parts)


def escape(part: str) -> str:
    """Return one part of a key as the name of a folder; different parts have different names.

    Example:
        >>> escape("kernel"), escape("layer.0"), escape(""), escape("50%"), escape("%2E")
        ('kernel', 'layer%2E0', '%-', '50%', '%252E')
    """
    if not part:
        return _EMPTY
    return _ESCAPED_CHARACTERS.sub(_percent_encode, part) if _NOT_ORDINARY.search(part) else part


def _percent_encode(found: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in found[0].encode("utf-8", "surrogatepass"))


def unescape(name: str) -> str:
    """Return the part that the name of a folder stands for; a name that `escape` never gives stands for itself.

    Example:
        >>> unescape("layer%2E0"), unescape("%-"), unescape("50%"), unescape("%41")
        ('layer.0', '', '50%', '%41')
    """
    if name == _EMPTY:
        return ""
    if not _LOOKS_ESCAPED.search(name):
        return name
    try:
        part = _ESCAPES.sub(_percent_decode, name)
    except UnicodeDecodeError:
        return name
    return part if escape(part) == name else name


def _percent_decode(found: re.Match[str]) -> str:
    return bytes.fromhex(found[0].replace("%", "")).decode("utf-8", "surrogatepass")


def parts_of_folder(folder: str, prefix: str | None) -> tuple[str, ...]:
    """Return the path of the leaf in a folder, below the prefix: what an index of another program says by it.

    A folder that does not lie below its prefix keeps all its parts. ``.`` is the directory itself: the bare array.

    Raises:
        CorruptError: the folder is no plain path below the directory: absolute, or with an empty part, ``.`` or ``..``.

    Example:
        >>> parts_of_folder("model/layer%2E0/w", "model"), parts_of_folder("model", "model")
        (('layer.0', 'w'), ())
        >>> parts_of_folder("../etc", None)
        Traceback (most recent call last):
        ...
        treering.errors.CorruptError: the folder '../etc' of a leaf leads out of the directory, or is not a path
    """
    if folder == ".":
        return ()
    parts = folder.split("/")
    if not {"", ".", ".."}.isdisjoint(parts) or "\0" in folder:
        raise CorruptError(f"the folder {folder[:200]!r} of a leaf leads out of the directory, or is not a path")
    above = [part for part in _PREFIX_SEPARATORS.split(prefix) if part] if prefix else []
    if parts[: len(above)] == above:
        parts = parts[len(above) :]
    return tuple(map(unescape, parts))


def find_overlap(folders: Iterable[str]) -> tuple[str, str] | None:
    """Return two folders that are equal, or of which the second lies in the first; None where there are none.

    Example:
        >>> find_overlap(["a/b", "c", "a"]), find_overlap(["a", "a"]), find_overlap(["a", "ab", "a-b"])
        (('a', 'a/b'), ('a', 'a'), None)
    """
    # In the order of texts, everything that begins as a folder does follows right behind it.
    ends = sorted(f"{folder}/" for folder in folders)
    for outer, inner in itertools.pairwise(ends):
        if inner.startswith(outer):
            return outer[:-1], inner[:-1]
    return None
