"""Every byte of a checkpoint, leaves directory or file compared with its checksums; jax is not needed for it."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import itertools
import os
import threading
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from treering._arrays.jobs import Tally, spans_of_file
from treering._checkpoint.forms import verify_bytes
from treering._checkpoint.source import is_attempt_there
from treering._codec.compression import GZIP_MAGIC
from treering._foreign.foreign_tree import compare_hashes
from treering._format.document import INDEX_NAME, parse_index
from treering._format.findings import (
    BadBlock,
    Finding,
    Verification,
    describe_broken,
    differing_runs,
    differing_span,
    merge_blocks,
    require_damage,
)
from treering._format.index import Index, Piece, damaged_pieces, describe_lost, describe_size, file_digest, span_range
from treering._format.safetensors import header_bytes, parse_safetensors
from treering._inspect.inspect import finish_saves, read_msgpack
from treering._store.api import Reader
from treering._store.crew import FirstError, work_together
from treering._store.open_folder import OpenFolder
from treering._store.resolve import located, open_file
from treering._values.keys import join_key
from treering._view.progress import Progress, reporter, showing
from treering._view.rows import leaves_of
from treering.errors import BusyError, CorruptError, DataFileMissingError, LinkRefusedError, NotFoundError, StoreError

# Each needs that data go whose grace was over.
_TRIES_IN_BUCKETS: Final = 4
_PIECE_BYTES: Final = 2 << 20
# Where each read waits for an answer.
_FAR_PIECE_BYTES: Final = 8 << 20
_FEW_THREADS: Final = 2
_TEXT_BYTES: Final = 1 << 20
_TWO_THREADS_FROM: Final = 4 << 20
_NO_CHECKSUMS: Final = "its form has no checksums, so its arrays were not checked"


def verify(path: str | os.PathLike[str], *, progress: Progress | bool | None = None) -> Verification:
    """Read every byte of a checkpoint, a leaves directory or a single file, and compare it with what was saved.

    What `treering.load` would refuse is a finding here, and the reverse. All damage is listed, not only the first.

    Args:
        path: a checkpoint's folder, a leaves directory, a run, of which every step is checked, a ``.safetensors`` file
            or a msgpack file. Of what treering did not write, and of msgpack, only headers, sizes and checksums that
            the form itself has, such as that of ``.npz``, can be checked; ``note`` says so, ``checked`` is False.
        progress: called as ``progress(done, total)``, in bytes, now and then, in the caller's thread. True shows a bar
            on a terminal.

    Returns:
        The outcome. It is true where nothing is wrong; its ``findings`` name leaf, file and bytes.

    Raises:
        NotFoundError: nothing is there.
        FormatError, UnsupportedError: it is of a form, a version or a dtype that this version does not read.
        StoreError: the system refuses to read the folder, the index or the file.

    Example:
        >>> from treering import serialization
        >>> serialization.save_to_file({"w": [1.5, 2.0]}, "state.msgpack")
        >>> found = verify("state.msgpack")
        >>> found.ok, found.checked
        (True, False)
    """
    told = reporter(progress, "checking")
    finish_saves(path)
    with showing(told):
        return verify_bytes(path, told)


def verify_run(path: str | os.PathLike[str], progress: Progress | None) -> Verification:
    """Check every step of a run; files are named with the folder of their step. Raises as `verify` does."""
    from treering._runs.steps import records_of, step_path, steps_of

    place = located(path)
    records = records_of(place)
    sizes = dict.fromkeys(records.unreadable, 0) | {record.step: record.nbytes for record in records.readable}
    total = sum(sizes.values())
    findings: list[Finding] = []
    checked: list[Verification] = []
    before, shared = 0, SharedFiles()
    for step, size in sorted(sizes.items()):
        folder = step_path(place, step)

        def report(done: int, of: int, before: int = before, size: int = size) -> None:
            if progress is not None:
                progress(before + size * done // (of or 1), total)

        try:
            found = verify_checkpoint(folder, report, shared)
        except NotFoundError:
            # The training may have removed it meanwhile, which is not damage.
            if step in steps_of(place):
                raise
            continue
        findings += [dataclasses.replace(each, file=os.path.join(folder.name, each.file)) for each in found.findings]  # noqa: PTH118 - a text for people
        checked.append(found)
        before += size
    leaves, nbytes = sum(found.leaves for found in checked), sum(found.nbytes for found in checked)
    found = Verification(path=os.fspath(path), findings=tuple(findings), leaves=leaves, nbytes=nbytes, checked=True)
    return dataclasses.replace(found, note=records.trouble, steps=len(checked))


# ---------------------------------------------------------------------------------------------------------- checkpoints


class SharedFiles:
    """What was found in files that several steps have, under a name each; such a file is read once."""

    def __init__(self) -> None:
        self._found: dict[Hashable, dict[Hashable, list[tuple[int, int, str]]]] = {}

    def recall(self, index: Index, number: int, file: Reader) -> list[BadBlock] | None:
        """Return what was found in a file where other steps have looked at all that this one has there, else None."""
        if (found := self._found.get(file.identity) if file.identity is not None else None) is None:
            return None
        rows = {row: _content_of(index, row) for row in index.chunks.of_file(number)}
        if not rows or any(content not in found for content in rows.values()):
            return None
        return [BadBlock(row, *bad) for row, content in rows.items() for bad in found[content]]

    def note(self, index: Index, number: int, file: Reader, bad: Iterable[BadBlock]) -> None:
        """Remember what was found in a file."""
        if file.identity is None:
            return
        found = self._found.setdefault(file.identity, {})
        rows = index.chunks.of_file(number)
        found |= {_content_of(index, row): [] for row in rows}
        for block in bad:
            if index.chunks.file[block.chunk] == number:
                found[_content_of(index, block.chunk)].append((block.start, block.stop, block.problem))


def _content_of(index: Index, row: int) -> Hashable:
    """Return what lies at a place of a file, as far as an index says it."""
    chunks, starts = index.chunks, index.chunks.first_blocks()
    return chunks.offset[row], chunks.nbytes[row], index.checksums[starts[row] : starts[row + 1]].tobytes()


def verify_checkpoint(
    path: str | os.PathLike[str], progress: Progress | None, shared: SharedFiles | None = None
) -> Verification:
    """Check a checkpoint, of which ``shared`` may know some files; raises as `verify` does."""
    for _ in range(_TRIES_IN_BUCKETS):
        with contextlib.ExitStack() as held:
            try:
                index, files, findings = _open_files(located(path), held)
            except (CorruptError, LinkRefusedError) as error:
                return _report_broken(os.fspath(path), INDEX_NAME, error)
            # In a bucket data may go while they are read. Are they not superseded, the next look finds them missing.
            with contextlib.suppress(DataFileMissingError):
                found = _verify_open(os.fspath(path), index, files, progress, shared)
                found = dataclasses.replace(found, findings=(*findings, *found.findings))
                if found.ok or is_attempt_there(located(path), index.attempt):
                    return found
    what = f"{os.fspath(path)!r} was replaced {_TRIES_IN_BUCKETS} times while it was being verified"
    raise BusyError(what, hint="try again")


def _verify_open(
    shown: str, index: Index, files: list[Reader | None], progress: Progress | None, shared: SharedFiles | None
) -> Verification:
    """Check a checkpoint that is open."""
    findings = [found for number, file in enumerate(files) for found in _check_file(index, number, file)]
    there = [(number, file) for number, file in enumerate(files) if file is not None and shared is not None]
    shared = shared or SharedFiles()
    recalled = {number: shared.recall(index, number, file) for number, file in there}
    known = {number: found for number, found in recalled.items() if found is not None}
    nbytes, bad = _check_data(index, files, progress, known)
    for number, file in there:
        if number not in known:
            shared.note(index, number, file, bad)
    bad += itertools.chain.from_iterable(known.values())
    bad += _find_bad_text(index, files, {block.chunk for block in bad})
    findings += merge_blocks(index, bad, [entry.name for entry in index.files])
    return Verification(path=shown, findings=tuple(findings), leaves=len(index.keys), nbytes=nbytes, checked=True)


def _open_files(path: Path, held: contextlib.ExitStack) -> tuple[Index, list[Reader | None], list[Finding]]:
    """Read the index, and open the data files that it names as far as they are there."""
    last = ""
    while True:
        with OpenFolder(path) as folder:
            index = parse_index(folder.read_index())
            files, findings, missing = _open_all(index, folder, held)
        # A file that is missing may be one that an overwrite replaced meanwhile; then the index is another too.
        if not missing or index.attempt == last:
            return index, files, findings
        last = index.attempt
        held.close()


def _open_all(
    index: Index, folder: OpenFolder, held: contextlib.ExitStack
) -> tuple[list[Reader | None], list[Finding], bool]:
    """Open every data file that can be opened; say what is wrong with the others, and whether any is missing."""
    files: list[Reader | None] = []
    findings: list[Finding] = []
    missing = False
    for number, entry in enumerate(index.files):
        try:
            files.append(held.enter_context(folder.open_files([entry.name])[entry.name]))
        except (CorruptError, LinkRefusedError, StoreError, NotFoundError) as error:
            require_damage(error)
            why = str(error) if isinstance(error, LinkRefusedError) else error.message
            gone, lost = isinstance(error, DataFileMissingError), describe_lost(index, number)
            problem = f"is missing{lost}" if gone else f"cannot be read{lost} ({why})"
            findings.append(Finding(key=None, file=entry.name, start=0, stop=entry.nbytes, problem=problem))
            files.append(None)
            missing |= gone
    return files, findings, missing


def _check_file(index: Index, number: int, file: Reader | None) -> Iterator[Finding]:
    """Check a data file's size and header."""
    if file is None:
        return
    entry = index.files[number]
    if (wrong := describe_size(file.size, entry.nbytes)) is not None:
        (start, stop), problem = wrong
        yield Finding(key=None, file=entry.name, start=start, stop=stop, problem=problem)
    try:
        header = file.read(0, entry.header)
    except (CorruptError, StoreError) as error:
        require_damage(error)
        problem = f"has a header that cannot be read ({error.message})"
        yield Finding(key=None, file=entry.name, start=0, stop=entry.header, problem=problem)
        return
    if file_digest(index, number, header) != entry.digest:
        start, stop = 0, entry.header
        if not index.digests:  # a header that may be shared has the attempt of the save that wrote it
            start, stop = differing_span(header, header_bytes(index, number))
            stop = min(stop, entry.header)
        yield Finding(key=None, file=entry.name, start=start, stop=stop, problem="has a damaged header")


# --------------------------------------------------------------------------------------------------------------- blocks


def _check_data(
    index: Index, files: Sequence[Reader | None], progress: Progress | None, known: Collection[int] = ()
) -> tuple[int, list[BadBlock]]:
    """Compare every block with its checksum, large totals in threads; return how many bytes, and the bad ones.

    Files that are ``known`` are not read.
    """
    starts = index.chunks.first_blocks()
    total = sum(index.chunks.nbytes)
    there = [(number, file) for number, file in enumerate(files) if file is not None and number not in known]
    threads = max((file.threads for _, file in there), default=1)
    most = _FAR_PIECE_BYTES if threads > _FEW_THREADS else _PIECE_BYTES
    spans = ((file, span) for number, file in there for span in spans_of_file(index, number, most))
    lock, failure, tally = threading.Lock(), FirstError(), Tally(total, progress)
    bad: list[BadBlock] = []

    def work() -> None:
        while failure.error is None:
            with failure:
                with lock:
                    span = next(spans, None)
                if span is None:
                    return
                bad.extend(_check_span(index, starts, *span))
                tally.add(span_range(index, span[1])[1])

    work_together(work, threads - 1 if total >= _TWO_THREADS_FROM else 0)
    failure.reraise()
    if progress is not None:
        progress(total, total)
    read = [files[number] is not None for number in index.chunks.file]
    return sum(itertools.compress(index.chunks.nbytes, read)), bad


def _check_span(index: Index, starts: Sequence[int], file: Reader, span: Sequence[Piece]) -> list[BadBlock]:
    blocks = index.chunks.block
    try:
        data = memoryview(file.read(*span_range(index, span)))
    except (CorruptError, StoreError) as error:
        require_damage(error)
        # Once more in smaller parts, down to one block, so that only what is lost is named.
        chunk, start, stop = span[0]
        size, parts = blocks[chunk], span
        if len(span) == 1 and stop - start <= size:
            lost = isinstance(error, CorruptError)
            problem = "is lost: the file ends before it" if lost else f"cannot be read ({error.message})"
            return [BadBlock(chunk, start, stop, problem)]
        if len(span) == 1:
            parts = [(chunk, at, min(at + size, stop)) for at in range(start, stop, size)]
        return [bad for part in parts for bad in _check_span(index, starts, file, [part])]
    return [
        BadBlock(chunk, start + low * blocks[chunk], min(start + high * blocks[chunk], stop), "is damaged")
        for (chunk, start, stop), found, wanted in damaged_pieces(index, starts, span, data)
        for low, high in differing_runs(found, wanted)
    ]


# ---------------------------------------------------------------------------------------------------------------- text


def _find_bad_text(index: Index, files: Sequence[Reader | None], damaged: set[int]) -> Iterator[BadBlock]:
    """Yield the chunk, and where in it, of each str leaf whose bytes no reader can turn into text.

    Reads a piece at a time, however long a text is.

    Args:
        index: the checkpoint's.
        files: its data files, None for those that cannot be opened.
        damaged: numbers of the chunks of which more is known already; their leaves are left out.
    """
    texts = [kind.stored and kind.kind == "str" for kind in index.types]
    if not any(texts):
        return
    chunks = index.chunks
    for leaf, rows in itertools.groupby(range(len(chunks)), chunks.leaf.__getitem__):
        if not texts[index.leaf_types[leaf]] or not damaged.isdisjoint(parts := list(rows)):
            continue
        if all(files[chunks.file[chunk]] is not None for chunk in parts):
            bad = _first_bad_text(index, files, sorted(parts, key=index.box_of))
            if bad is not None:
                yield bad


def _first_bad_text(index: Index, files: Sequence[Reader | None], parts: list[int]) -> BadBlock | None:
    """Decode one text, part after part, and return the piece in which it ends to be UTF-8."""
    chunks = index.chunks
    decoder = codecs.getincrementaldecoder("utf-8")("surrogatepass")
    for chunk in parts:
        file, nbytes = files[chunks.file[chunk]], chunks.nbytes[chunk]
        for start in range(0, nbytes, _TEXT_BYTES):
            stop = min(start + _TEXT_BYTES, nbytes)
            last = chunk == parts[-1] and stop == nbytes
            try:
                decoder.decode(b"" if file is None else file.read(chunks.offset[chunk] + start, stop - start), last)
            except UnicodeDecodeError:
                return BadBlock(chunk, start, stop, "is not UTF-8, as text must be")
            except (CorruptError, StoreError):
                return None  # that it cannot be read was found before
    return None


# --------------------------------------------------------------------------------------------------------- single files


def _report_broken(
    path: str, file: str, error: CorruptError | LinkRefusedError, *, checked: bool = True
) -> Verification:
    """Return the outcome where nothing but that can be said."""
    key = join_key(error.path) if error.path else None
    finding = dataclasses.replace(describe_broken(file, error), key=key)
    return Verification(path=path, findings=(finding,), leaves=0, nbytes=0, checked=checked)


def verify_safetensors(path: str | os.PathLike[str], progress: Progress | None) -> Verification:
    """Check a safetensors file; raises as `verify` does."""
    shown = os.fspath(path)
    with open_file(located(path)) as file:
        try:
            index = parse_safetensors(file.size, file.read)
        except CorruptError as error:
            return _report_broken(shown, shown, error)
        leaves = len(index.keys)
        if not index.verified:
            note = "it was not written by treering and has no checksums, so its arrays were not checked"
            return _unchecked(shown, file, leaves, note)
        nbytes, bad = _check_data(index, [file], progress)
        findings = tuple(merge_blocks(index, bad, [shown]))
    return Verification(path=shown, findings=findings, leaves=leaves, nbytes=nbytes, checked=True)


def verify_msgpack(path: str | os.PathLike[str], progress: Progress | None) -> Verification:
    """Check the headers of a msgpack file; in gzip form also gzip's own checksum, which covers everything."""
    del progress  # a file of headers takes no time
    shown = os.fspath(path)
    with open_file(path) as file:
        zipped = file.read(0, min(file.size, len(GZIP_MAGIC))) == GZIP_MAGIC
        try:
            listing, _ = read_msgpack(file)
        except CorruptError as error:
            return _report_broken(shown, shown, error, checked=zipped)
        leaves = sum(1 for _ in leaves_of(listing.root))
        if not zipped:
            return _unchecked(shown, file, leaves, _NO_CHECKSUMS)
    return Verification(path=shown, findings=(), leaves=leaves, nbytes=listing.file_bytes, checked=True)


def _unchecked(shown: str, file: Reader, leaves: int, note: str) -> Verification:
    """Return the outcome of a file that has no checksums, unless the cache of the hub names it by one."""
    findings: list[Finding] = []
    note = compare_hashes([file], findings) or note
    return Verification(path=shown, findings=tuple(findings), leaves=leaves, nbytes=0, checked=False, note=note)
