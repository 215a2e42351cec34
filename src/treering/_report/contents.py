"""What lies at a path -> a JSON-able document: the leaves in columns, and tables for people; never with jax."""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from treering import __version__
from treering._checkpoint.forms import list_headers, read_checkpoint_index
from treering._format.document import parse_index
from treering._format.index import Index, LeafType, leaf_bytes
from treering._format.listing import LeafRecord, Listing
from treering._format.run_document import remove_note
from treering._inspect.diff import blocks_of, compare_listings, needs_reading, pair_nodes, unequal_items
from treering._inspect.inspect import ArrayView, list_steps, open_leaf_by_leaf
from treering._printable import printable, show_path
from treering._store.resolve import kept, located, store_at
from treering._values.boxes import Box
from treering._values.human import bytes_text, count_text, duration_text, pluralize
from treering._view.listings import form_text, notes_of
from treering._view.plain import cut, json_text, visible
from treering._view.progress import reporter, showing
from treering._view.rows import LONGEST_KEY, Totals, leaves_of, record_of, weight_of
from treering._view.run_text import RunListing, rule_notes, when_text
from treering._view.tree_text import leaf_cells
from treering.errors import CorruptError, NotFoundError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from treering._format.findings import Verification

SCHEMA: Final = "treering.report/1"
MOST_LEAVES: Final = 50_000
"""So many leaves have a row of their own, the largest; smaller ones are added up by branch."""
_MOST_FOLDED: Final = 5_000
_MOST_ROWS: Final = 5_000
_DEEPEST: Final = 32


def gather(
    path: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    stats: bool = False,
    verify: bool = False,
) -> dict[str, Any]:
    """Collect what a report shows of a checkpoint, a leaves directory, a run or a file.

    Without the options headers are read, and no array. Of a run, the latest step is shown beside its history.

    Args:
        path: what is shown; any form and any store that treering reads.
        against: another checkpoint, file or run, to which it is compared.
        stats: also read every array, a few MiB at a time, for its statistics and its histogram.
        verify: also read every byte and compare it with its checksums.

    Raises:
        NotFoundError, StoreError: it cannot be read.
        CorruptError: its headers are damaged, and ``verify`` was not asked to say so on the page.
        FormatError, UnsupportedError: it is of another form.

    Example:
        >>> from treering import serialization
        >>> serialization.save_to_file({"w": [1.5, 2.0], "step": 7}, "state.msgpack")
        >>> document = gather("state.msgpack")
        >>> document["leaves"]["keys"], document["totals"]["nbytes"]
        (['w/0', 'w/1', 'step'], 24)
    """
    path = kept(path)
    run = list_steps(path)
    place = run.steps[-1].path if run is not None and run.steps else path
    found, lost = None, None
    if verify:
        from treering._inspect.verify import verify as check

        found = check(path, progress=True)
    try:
        listing = _empty(run) if run is not None and not run.steps else list_headers(place)
    except CorruptError as error:
        if found is None:
            raise
        listing, lost = Listing(form="damaged", file_bytes=0, root={}), error.message
    document = _describe_tree(listing)
    document |= {"path": visible(show_path(os.fspath(path)), 500), "step": None, "tables": []}
    document["notes"] = [(label, printable(cut(text, 2000))) for label, text in _notes(listing, run, lost)]
    if run is not None:
        document["step"] = run.steps[-1].step if run.steps else None
        document["history"] = _history(run)
        document["tables"].append(_step_table(run))
    if found is not None:
        document["damaged"] = _damaged_keys(found, os.path.basename(os.fspath(place)))  # noqa: PTH119 - perhaps a URL
        document["tables"].append(_verification_table(found))
    document["splits"] = [] if lost else list_splits(place, listing)
    if against is not None and not lost:
        changes = functools.partial(compare, against, place, read=stats)
        document["tables"].append(_unless_damaged("changes", "Changes", changes, found))
    if stats and not lost:
        document["tables"].append(_unless_damaged("statistics", "Statistics", lambda: describe_leaves(place), found))
    return document


def _unless_damaged(
    name: str, title: str, read: Callable[[], dict[str, Any]], found: Verification | None
) -> dict[str, Any]:
    """Return a table that reads arrays; a note in its place where damage ends that, which the page shows already.

    Raises:
        CorruptError, NotFoundError: something is damaged or missing, and no verification found damage.
    """
    try:
        return read()
    except (CorruptError, NotFoundError) as error:
        if found is None or found.ok:
            raise
        note = printable(cut(f"There is no table, because not all could be read: {error}", 2000))
        return {"id": name, "title": f"{title}: not read", "note": note, "heads": [], "right": [], "rows": []}


def _empty(run: RunListing) -> Listing:
    return Listing(form=run.form, file_bytes=0, root={}, notes=("it has no step yet",))


# ------------------------------------------------------------------------------------------------------------- leaves


def _describe_tree(listing: Listing) -> dict[str, Any]:
    """Give the leaves as columns: key, type and bytes of each, with what several have in common in ``types``."""
    leaves = list(leaves_of(listing.root))
    totals, dtypes = Totals(), dict[str, Totals]()
    for _, leaf in leaves:
        totals.add_leaf(leaf)
        dtypes.setdefault(record_of(leaf).dtype or leaf_cells(leaf)[0], Totals()).add_leaf(leaf)
    shown, folded = fold(leaves, MOST_LEAVES)
    types: dict[tuple[Any, ...], int] = {}
    numbers = [types.setdefault(_type_of(leaf), len(types)) for _, leaf in shown]
    split = sorted(dtypes.items(), key=lambda pair: -pair[1].nbytes)
    return {
        "schema": SCHEMA,
        "made": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC",
        "by": f"treering {__version__}",
        "form": form_text(listing),
        "totals": _totals(totals) | {"file_bytes": listing.file_bytes},
        "dtypes": [[visible(name), _totals(each)] for name, each in split],
        "types": list(types),
        "leaves": {
            "keys": [visible(key, LONGEST_KEY) for key, _ in shown],
            "types": numbers,
            "nbytes": [weight_of(leaf)[0] for _, leaf in shown],
        },
        "folded": [[visible(key, LONGEST_KEY), each.leaves, each.nbytes] for key, each in folded],
    }


def _totals(totals: Totals) -> dict[str, Any]:
    texts = {"bytes": bytes_text(totals.nbytes), "elements": count_text(totals.parameters)}
    numbers = {"leaves": totals.leaves, "arrays": totals.arrays, "nbytes": totals.nbytes}
    return numbers | {"parameters": totals.parameters} | texts


def _type_of(leaf: Any) -> tuple[str, str, int, str]:
    """Return what a row says of a leaf beside its key and bytes: dtype, shape or value, chunks, sharding."""
    dtype, detail = leaf_cells(leaf)
    if not isinstance(leaf, LeafRecord):
        return dtype, detail, 0, ""
    split = leaf.sharding or (f"chunks of {list(leaf.chunk_shape)}" if leaf.chunk_shape else "")
    if leaf.processes:
        split += f"; written by {pluralize(len(leaf.processes), 'processes')}"
    return dtype, detail, leaf.chunks, visible(split)


def fold(leaves: Sequence[tuple[str, Any]], most: int) -> tuple[list[tuple[str, Any]], list[tuple[str, Totals]]]:
    """Return the largest leaves in their order, and the sums of the others by branch, so few levels that it is short.

    Example:
        >>> kept, folded = fold([("a/x", 1), ("a/y", "a long text"), ("b/z", True)], 1)
        >>> kept, [(key, totals.nbytes) for key, totals in folded]
        ([('a/y', 'a long text')], [('a', 8), ('b', 1)])
    """
    if len(leaves) <= most:
        return list(leaves), []
    order = sorted(range(len(leaves)), key=lambda place: -weight_of(leaves[place][1])[0])
    chosen = set(order[:most])
    small = [leaf for place, leaf in enumerate(leaves) if place not in chosen]
    sums: dict[str, Totals] = {}
    for depth in range(min(max(key.count("/") for key, _ in small), _DEEPEST), -1, -1):
        sums = {}
        for key, leaf in small:
            sums.setdefault("/".join(key.split("/")[:-1][:depth]), Totals()).add_leaf(leaf)
        if len(sums) <= _MOST_FOLDED:
            break
    return [leaves[place] for place in sorted(chosen)], list(sums.items())


def _notes(listing: Listing, run: RunListing | None, lost: str | None) -> Iterable[tuple[str, str]]:
    if lost:
        yield "damaged", lost
    if run is not None:
        yield from rule_notes(run)
    yield from (pair for pair in notes_of(listing) if pair[0] not in {"form", "metadata"})
    if noted := remove_note(listing.metadata):
        yield "metadata", json_text(noted)


# ------------------------------------------------------------------------------------------------------ runs, findings


def _history(run: RunListing) -> dict[str, Any]:
    """Give the steps of a run as columns, for plots."""
    names = list(dict.fromkeys(name for step in run.steps for name in step.metrics))
    return {
        "steps": [step.step for step in run.steps],
        "kept": [step.kept for step in run.steps],
        "series": [
            ["bytes", [step.nbytes for step in run.steps]],
            ["save time (s)", [step.seconds for step in run.steps]],
            *([visible(name), [step.metrics.get(name) for step in run.steps]] for name in names[:_MOST_METRICS]),
        ],
    }


_MOST_METRICS: Final = 24
_METRIC_COLUMNS: Final = 4


def _step_table(run: RunListing) -> dict[str, Any]:
    names = list(dict.fromkeys(name for step in reversed(run.steps) for name in step.metrics))[:_METRIC_COLUMNS]
    rows = []
    for step in reversed(run.steps[-_MOST_ROWS:]):
        why = "; ".join(step.reasons) or ("" if step.kept else "no rule keeps it")
        metrics = [f"{step.metrics[name]:.5g}" if name in step.metrics else "" for name in names]
        took = "" if step.seconds is None else duration_text(step.seconds)
        held = f"; {step.held}" if step.held else ""
        goes = "" if step.kept else "goes: "
        when, why = when_text(step.saved), printable(cut(goes + why + held, 300))
        rows.append([str(step.step), when, bytes_text(step.nbytes), took, *metrics, why])
    heads = ["step", "saved", "bytes", "save took", *map(visible, names), "why it stays"]
    title = f"History: {pluralize(len(run.steps), 'steps', ',')}, {bytes_text(run.nbytes)}"
    return {"id": "history", "title": title, "heads": heads, "right": [0, *range(2, 4 + len(names))], "rows": rows}


def _verification_table(found: Verification) -> dict[str, Any]:
    rows = [[visible(each.key or "", 300), visible(each.file), str(each)] for each in found.findings[:_MOST_ROWS]]
    title = "Verification: " + ("whole" if found.ok else pluralize(len(found.findings), "findings", ","))
    state = "good" if found.ok and found.checked else "bad" if not found.ok else "unsure"
    return {
        "id": "verification",
        "title": title,
        "state": state,
        "note": str(found).splitlines()[0],
        "heads": ["leaf", "file", "what is wrong"],
        "right": [],
        "rows": rows,
    }


def _damaged_keys(found: Verification, folder: str) -> list[str]:
    """Return the keys of the damaged leaves of what is shown; of a run the other steps have findings too."""
    here = [each for each in found.findings if found.steps is None or each.file.startswith(f"{folder}/")]
    return [visible(each.key, LONGEST_KEY) for each in here if each.key is not None]


# ---------------------------------------------------------------------------------------- how arrays are cut into boxes


_MOST_WAYS: Final = 24
_MOST_BOXES: Final = 1024

_Cut: TypeAlias = tuple[LeafType, tuple[Box, ...], tuple[int | None, ...]]
"""One way of cutting arrays of one shape: into which boxes, and the process that wrote each; none where it was one."""


def list_splits(path: str | os.PathLike[str], listing: Listing) -> list[dict[str, Any]]:
    """Return the ways in which arrays are cut into several boxes, the one with the most bytes first.

    Args:
        path: the checkpoint, leaves directory or file.
        listing: what its headers say.

    Raises:
        CorruptError, StoreError: the index cannot be read.
    """
    records = [(key, leaf) for key, leaf in leaves_of(listing.root) if isinstance(leaf, LeafRecord) and leaf.chunks > 1]
    if not records:
        return []
    data = read_checkpoint_index(located(path))
    ways: dict[_Cut, dict[str, Any]] = {}
    for found, key, nbytes in _cuts_of_records(records) if data is None else _cuts_of_index(parse_index(data)):
        way = ways.setdefault(found, {"example": key, "leaves": 0, "nbytes": 0})
        way["leaves"] += 1
        way["nbytes"] += nbytes
    return [
        {
            "shape": kind.shape or (),
            "boxes": [[side for pair in box for side in pair] for box in boxes],
            "writers": [each for each in writers if each is not None],
            "sharding": visible(kind.sharding or ""),
            **way,
            "example": visible(way["example"], 300),
            "bytes": bytes_text(way["nbytes"]),
            "mesh": list(listing.meshes),
        }
        for (kind, boxes, writers), way in sorted(ways.items(), key=lambda pair: -pair[1]["nbytes"])[:_MOST_WAYS]
    ]


def _cuts_of_index(index: Index) -> Iterator[tuple[_Cut, str, int]]:
    """Yield how each array is cut, its key and its bytes."""
    chunks = index.chunks
    for leaf, rows in itertools.groupby(range(len(chunks)), chunks.leaf.__getitem__):
        if 1 < len(some := list(rows)) <= _MOST_BOXES:
            kind, writers = index.type_of(leaf), tuple(index.files[chunks.file[row]].process for row in some)
            yield (kind, tuple(map(index.box_of, some)), writers), index.keys[leaf], leaf_bytes(kind)


def _cuts_of_records(records: Iterable[tuple[str, LeafRecord]]) -> Iterator[tuple[_Cut, str, int]]:
    """Yield the same of arrays that are cut into chunks of one shape, as zarr does."""
    for key, leaf in records:
        if (found := _cut_of_chunks(leaf.shape or (), leaf.chunk_shape or ())) is not None:
            yield found, key, leaf.nbytes


@functools.lru_cache(maxsize=256)
def _cut_of_chunks(shape: tuple[int, ...], chunk: tuple[int, ...]) -> _Cut | None:
    lengths = list(zip(shape, chunk, strict=bool(chunk)))
    if not lengths or not all(chunk) or math.prod(-(-length // step) for length, step in lengths) > _MOST_BOXES:
        return None
    sides = [[(at, min(at + step, length)) for at in range(0, length, step)] for length, step in lengths]
    kind = LeafType(kind="numpy", shape=shape, sharding=f"chunks of {list(chunk)}")
    return kind, tuple(itertools.product(*sides)), ()


# -------------------------------------------------------------- statistics: every array read once, a few MiB at a time


BLOCK_BYTES: Final = 2 << 20
"""So much of an array is read at a time; as float64, the widest that is computed with, it is at most 8 times that."""
_FINE: Final = 1024
_BARS: Final = 32
_TALLEST: Final = 99


def describe_leaves(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the arrays at a path, and return a table of what is in each; of very many the largest.

    Raises:
        CorruptError, StoreError: a block is damaged or cannot be read.
    """
    rows: list[list[Any]] = []
    told = reporter(True, "reading")
    with open_leaf_by_leaf(path) as tree, showing(told):
        records = [(key, leaf) for key, leaf in leaves_of(tree.listing.root) if isinstance(leaf, LeafRecord)]
        arrays = [(key, leaf) for key, leaf in records if leaf.dtype is not None and leaf.kind != "key"]
        most = sorted(arrays, key=lambda pair: -pair[1].nbytes)[:_MOST_ROWS]
        done, total = 0, sum(leaf.nbytes for _, leaf in most)
        for key, leaf in most:
            rows.append([visible(key, 300), *summarize(tree.array(leaf)).cells()])
            done += leaf.nbytes
            if told is not None:
                told(done, total)
    left = f"; {pluralize(len(arrays) - len(most), 'smaller ones', ',')} not read" if len(arrays) > len(most) else ""
    heads = ["key", "min", "max", "mean", "std", "zeros", "nan", "inf", "histogram"]
    title = f"Statistics of {pluralize(len(most), 'arrays', ',')}{left}"
    return {"id": "statistics", "title": title, "heads": heads, "right": list(range(1, 8)), "rows": rows}


def summarize(view: ArrayView) -> Summary:
    """Read an array block by block; of complex numbers the magnitudes count.

    Raises:
        CorruptError, StoreError: a block is damaged or cannot be read.
    """
    import numpy as np

    found = Summary()
    for box in blocks_of(view.shape, view.dtype.itemsize, BLOCK_BYTES):
        block = np.asarray(view[box]).reshape(-1)
        with np.errstate(all="ignore"):
            found.add(np.abs(block).astype(np.float64) if block.dtype.kind == "c" else block.astype(np.float64))
    return found


class Summary:
    """What is known of the numbers that were added so far.

    Example:
        >>> import numpy as np
        >>> found = Summary()
        >>> found.add(np.array([0.0, 1.0, 2.0]))
        >>> found.add(np.array([9.0, np.nan]))
        >>> found.low, found.high, found.mean, found.zeros, found.nans, sum(found.counts)
        (0.0, 9.0, 3.0, 1, 1, 4)
    """

    def __init__(self) -> None:
        self.items = self.finite = self.zeros = self.nans = self.infinite = 0
        self.low, self.high = math.inf, -math.inf
        self.mean = self.squares = 0.0
        self.counts: list[int] = []
        self._start = self._span = 0.0

    def add(self, block: NDArray[Any]) -> None:
        """Add a block of float64."""
        import numpy as np

        self.items += block.size
        self.nans += (nans := int(np.isnan(block).sum()))
        good = block[np.isfinite(block)]
        self.infinite += block.size - good.size - nans
        if not good.size:
            return
        self.zeros += good.size - int(np.count_nonzero(good))
        low, high, mean = float(good.min()), float(good.max()), float(good.mean())
        # Two parts are joined as Chan, Golub and LeVeque do it: no sum of squares that loses its digits.
        share, apart = good.size / (self.finite + good.size), mean - self.mean
        self.squares += float(((good - mean) ** 2).sum()) + apart * apart * self.finite * share
        self.mean += apart * share
        self.finite += good.size
        self.low, self.high = min(self.low, low), max(self.high, high)
        self._count(good, low, high)

    def _count(self, good: NDArray[Any], low: float, high: float) -> None:
        """Count into narrow bins of one width, which double where a block lies outside."""
        import numpy as np

        if not self.counts:
            self.counts = [0] * _FINE
            self._start, self._span = low, (high - low) or abs(low) or 1.0
        while math.isfinite(self._span) and (low < self._start or high > self._start + self._span):
            pairs = [sum(self.counts[at : at + 2]) for at in range(0, _FINE, 2)]
            below = low < self._start
            self.counts = [0] * (_FINE // 2) + pairs if below else pairs + [0] * (_FINE // 2)
            self._start -= self._span if below else 0.0
            self._span *= 2
        if math.isfinite(self._span + abs(self._start)):
            found, _ = np.histogram(good, _FINE, (self._start, self._start + self._span))
            self.counts = [before + int(more) for before, more in zip(self.counts, found, strict=True)]

    def bars(self) -> list[int]:
        """Return the histogram from the least to the greatest number, each bar's height from 0 to 99."""
        if not self.finite or not any(self.counts):
            return []
        width, sums = (self.high - self.low) or 1.0, [0] * _BARS
        for place, count in enumerate(self.counts):
            middle = self._start + (place + 0.5) * self._span / _FINE
            sums[min(max(int((middle - self.low) / width * _BARS), 0), _BARS - 1)] += count
        # A bar that is not empty can be seen.
        return [-(-each * _TALLEST // max(sums)) for each in sums]

    def cells(self) -> list[Any]:
        """Return min, max, mean, standard deviation, counts, and the bars of the histogram."""
        numbers = [""] * 4
        if self.finite:
            with contextlib.suppress(OverflowError):
                deviation = math.sqrt(self.squares / self.finite)
                numbers = [f"{each:.4g}" for each in (self.low, self.high, self.mean, deviation)]
        counts = [f"{each:,}" if each else "" for each in (self.zeros, self.nans, self.infinite)]
        return [*numbers, *counts, {"bars": self.bars()}]


# ---------------------------------------------------------------- changes: which leaves, and by how much, since another


_WORDS: Final = {"missing": "only in one", "value": "another value", "node": "another container"}


def compare(before: str | os.PathLike[str], after: str | os.PathLike[str], *, read: bool) -> dict[str, Any]:
    """Return a table of the leaves that differ, those that changed most first.

    Args:
        before: the one to which the other is compared; of a run its latest step.
        after: the one that is shown.
        read: also read arrays that lie in a bucket; those on a disk are read in any case.

    Raises:
        NotFoundError, StoreError, CorruptError, FormatError: one of them cannot be read.
    """
    before = kept(before)
    read = read or not any(store_at(path).asks_by_request for path in (before, after))
    told = reporter(True, "comparing")
    with open_leaf_by_leaf(before) as left, open_leaf_by_leaf(after) as right, showing(told):
        differences = compare_listings(left.listing, right.listing)
        rows: list[list[Any]] = [
            [each.key, _WORDS.get(each.what, each.what), each.a or "", each.b or "", "", ""] for each in differences
        ]
        pairs = [pair for pair in pair_nodes(left.listing.root, right.listing.root) if needs_reading(*pair[1:])]
        arrays = [(key, a, b) for key, a, b in pairs if all(isinstance(x, LeafRecord) and x.dtype for x in (a, b))]
        changed = []
        for number, (key, a, b) in enumerate(arrays if read else ()):
            if told is not None:
                told(number, len(arrays))
            if (found := measure_change(left.array(a), right.array(b))) is not None:
                changed.append((found[0], [key, *found[1]]))
    rows += [row for _, row in sorted(changed, key=lambda pair: -pair[0])]
    same = len(arrays) - len(changed)
    note = f"{pluralize(same, 'arrays', ',')} are equal bit for bit." if read else "Arrays were not read: --stats does."
    return {
        "id": "changes",
        "title": f"Changes: {pluralize(len(rows), 'differences', ',')} from {visible(show_path(os.fspath(before)))}",
        "note": note,
        "heads": ["key", "what differs", "before", "after", "largest change", "relative change"],
        "right": [4, 5],
        "rows": [[visible(row[0], 300), *(printable(cut(cell, 300)) for cell in row[1:])] for row in rows[:_MOST_ROWS]],
    }


def measure_change(before: ArrayView, after: ArrayView) -> tuple[float, list[str]] | None:
    """Compare two arrays of one shape and dtype block by block; None where every bit is the same.

    Returns:
        The relative change, the norm of the difference by that of the first, and texts for a row: the items that
        differ, of how many, the largest change of an item, and the relative change.
    """
    import numpy as np

    differing = items = 0
    most = apart = size = 0.0
    for box in blocks_of(before.shape, before.dtype.itemsize, BLOCK_BYTES):
        old, new = (np.asarray(view[box], order="C").reshape(-1) for view in (before, after))
        items += old.size
        if (unequal := unequal_items(old, new)) is not None:
            differing += int(unequal.sum())
        wide = np.complex128 if old.dtype.kind == "c" else np.float64
        with np.errstate(all="ignore"):
            left, right = old.astype(wide), new.astype(wide)
            change = np.abs(right - left)
            most = max(most, float(np.nan_to_num(change, nan=0.0).max(initial=0.0)))
            apart += float((np.nan_to_num(change, nan=0.0) ** 2).sum())
            size += float((np.abs(np.nan_to_num(left, nan=0.0)) ** 2).sum())
    if not differing:
        return None
    relative = math.inf
    with contextlib.suppress(ZeroDivisionError):
        relative = math.sqrt(apart / size)
    percent = f"{100 * relative:.3g}%" if math.isfinite(relative) else "from zero"
    return relative, [f"{differing:,} of {items:,} items", "", "", f"{most:.4g}", percent]
