"""What a check of a checkpoint found: where the damage is, in terms of leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from treering._format.index import Index
from treering._printable import LONGEST_LINE, cut_middle, printable, show_path
from treering._values.human import bytes_text, pluralize

_MOST_LINES = 50


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong.

    Example:
        >>> print(Finding(key="params/w", file="data.safetensors", start=4096, stop=8192, problem="is damaged"))
        leaf 'params/w' is damaged: bytes 4096 to 8192 of data.safetensors
        >>> print(Finding(key=None, file="treering.json", start=None, stop=None, problem="is a link"))
        treering.json is a link
    """

    key: str | None
    """Key text of the leaf; None where no leaf alone is concerned."""
    file: str
    """Name of the file, in the folder that was checked; its path where it is the only one."""
    start: int | None
    """First byte of the file that is concerned, if that is known."""
    stop: int | None
    """Byte behind the last one."""
    problem: str
    """What is wrong, as the end of a sentence that begins with the leaf or the file."""

    def __str__(self) -> str:
        place = f"byte {self.start}" if self.stop is None else f"bytes {self.start} to {self.stop}"
        place = "" if self.start is None else place
        file, problem = printable(self.file), printable(self.problem)
        key = cut_middle(self.key or "", LONGEST_LINE)
        if self.key is None:
            return f"{file} {problem}" + (f": {place}" if place else "")
        return f"leaf {key!r} {problem}: {place} of {file}" if place else f"leaf {key!r} {problem}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verification:
    """The outcome of a check; true where nothing is wrong.

    Example:
        >>> good = Verification(path="ckpt", findings=(), leaves=3, nbytes=1 << 20, checked=True)
        >>> bool(good), str(good)
        (True, "'ckpt' is whole: 3 leaves, 1.00 MiB, every byte checked")
    """

    path: str
    """What was checked, as it was given."""
    findings: tuple[Finding, ...]
    """What is wrong: first the files as a whole, then leaves in the order in which they lie in them."""
    leaves: int
    """How many leaves there are; 0 where the index cannot be read."""
    nbytes: int
    """Bytes of arrays that were read and compared with their checksums."""
    checked: bool
    """Whether there were checksums to compare with."""
    note: str | None = None
    """What the check could not say, or saw beside what it checked, if anything."""
    steps: int | None = None
    """How many steps of a run were checked; None where it was no run."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, as far as there was something to check against."""
        return not self.findings

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        return f"<Verification: {str(self).splitlines()[0]}>"

    def __str__(self) -> str:
        note = printable(self.note or "")
        size = f"{pluralize(self.leaves, 'leaves')}, {bytes_text(self.nbytes)}"
        if self.steps is not None:
            size = f"{pluralize(self.steps, 'steps')}, {size}"
        if not self.findings:
            if not self.checked:
                sound = f"is sound as far as it has checksums ({size})" if self.nbytes else "has sound headers"
                return f"{show_path(self.path)!r} {sound}, and {note}"
            more = f"; note: {note}" if note else ""
            return f"{show_path(self.path)!r} is whole: {size}, every byte checked{more}"
        lines = [f"{show_path(self.path)!r} is damaged: {pluralize(len(self.findings), 'findings')}"]
        lines += [f"  {finding}" for finding in self.findings[:_MOST_LINES]]
        if len(self.findings) > _MOST_LINES:
            lines.append(f"  and {len(self.findings) - _MOST_LINES} more")
        if note:
            lines.append(f"  note: {note}")
        return "\n".join(lines)


def describe_size(found: int, wanted: int) -> tuple[tuple[int, int], str] | None:
    """Say how the size of a file differs from the one that was written, and which bytes that concerns.

    Example:
        >>> describe_size(3, 5)
        ((3, 5), 'is cut short: 5 bytes were written, 3 are there')
    """
    if found == wanted:
        return None
    how = "cut short" if found < wanted else "too long"
    problem = f"is {how}: {pluralize(wanted, 'bytes were')} written, {found} are there"
    return (min(found, wanted), max(found, wanted)), problem


def describe_lost(index: Index, file: int) -> str:
    """Say which leaves lie in a data file, as the end of a part of a sentence; nothing where none do."""
    chunks = index.chunks
    if not (lost := list(dict.fromkeys(chunks.leaf[chunk] for chunk in chunks.of_file(file)))):
        return ""
    more = f" and {pluralize(len(lost) - 1, 'more leaves')}" if len(lost) > 1 else ""
    return f", and with it {index.keys[lost[0]]!r:.200}{more}"


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class BadBlock:
    """A stretch of a chunk, of whole blocks, that is not what it was."""

    chunk: int
    """Number of the chunk."""
    start: int
    """First byte in the chunk."""
    stop: int
    """Byte behind the last one."""
    problem: str
    """As in ``Finding``."""


def merge_blocks(index: Index, blocks: Iterable[BadBlock], names: list[str]) -> Iterator[Finding]:
    """Yield a finding for each stretch of bad blocks of one chunk.

    Args:
        index: the checkpoint's.
        blocks: what was found, in any order.
        names: of the data files.
    """
    merged: list[BadBlock] = []
    for block in sorted(blocks):
        last = merged[-1] if merged else None
        if last and (last.chunk, last.stop, last.problem) == (block.chunk, block.start, block.problem):
            merged[-1] = dataclasses.replace(last, stop=block.stop)
        else:
            merged.append(block)
    chunks = index.chunks
    for block in merged:
        offset, key = chunks.offset[block.chunk], index.keys[chunks.leaf[block.chunk]]
        start, stop, file = offset + block.start, offset + block.stop, names[chunks.file[block.chunk]]
        yield Finding(key=key, file=file, start=start, stop=stop, problem=block.problem)
