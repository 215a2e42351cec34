"""What lies at a path -> a JSON-able document: the leaves in columns, and tables for people; never with jax."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from treering import __version__
from treering._checkpoint.detect import ForeignForm, Form, detect
from treering._checkpoint.forms import list_headers
from treering._format.listing import LeafRecord, Listing
from treering._format.run_document import remove_note
from treering._printable import show_path
from treering._report.changes import compare
from treering._report.splits import list_splits
from treering._report.statistics import describe_leaves
from treering._store.resolve import kept
from treering._values.human import bytes_text, count_text, duration_text, pluralize
from treering._view.listings import form_text, notes_of
from treering._view.plain import visible
from treering._view.rows import LONGEST_KEY, Totals, leaves_of, record_of, weight_of
from treering._view.run_text import RunListing, when_text
from treering._view.tree_text import leaf_cells
from treering.errors import CorruptError

if TYPE_CHECKING:
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
    run = _list_steps(path)
    place = run.steps[-1].path if run is not None and run.steps else path
    found = _verify(path) if verify else None
    lost = None
    try:
        listing = _empty(run) if run is not None and not run.steps else list_headers(place)
    except CorruptError as error:
        if found is None:
            raise
        listing, lost = Listing(form="damaged", file_bytes=0, root={}), error.message
    document = _describe_tree(listing)
    document |= {"path": visible(show_path(os.fspath(path)), 500), "step": None, "tables": []}
    document["notes"] = [(label, visible(text, 2000)) for label, text in _notes(listing, run, lost)]
    if run is not None:
        document["step"] = run.steps[-1].step if run.steps else None
        document["history"] = _history(run)
        document["tables"].append(_step_table(run))
    if found is not None:
        document["damaged"] = _damaged_keys(found, os.path.basename(os.fspath(place)))  # noqa: PTH119 - perhaps a URL
        document["tables"].append(_verification_table(found))
    document["splits"] = [] if lost else list_splits(place, listing)
    if against is not None and not lost:
        document["tables"].append(compare(against, place, read=stats))
    if stats and not lost:
        document["tables"].append(describe_leaves(place))
    return document


def _list_steps(path: str | os.PathLike[str]) -> RunListing | None:
    """List the steps of a run, or of a folder of steps of another program; None for everything else."""
    form = detect(path)
    if form is Form.RUN:
        from treering._runs.reports import list_run

        return list_run(path)
    if isinstance(form, ForeignForm):
        from treering._foreign.foreign_tree import find_steps
        from treering._runs.reports import list_foreign_steps

        steps = find_steps(path, form)
        return None if steps is None else list_foreign_steps(path, steps)
    return None


def _verify(path: str | os.PathLike[str]) -> Verification:
    from treering._inspect.verify import verify as check

    return check(path, progress=True)


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
        yield "keep", run.keep or "every step, no rule is noted"
        yield from [("save every", run.save_every)] if run.save_every else []
        yield from (("note", note) for note in run.notes)
    noted = remove_note(listing.metadata)
    yield from (pair for pair in notes_of(listing) if pair[0] not in {"form", "metadata"})
    if noted:
        from treering._view.plain import json_text

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
        when, why = when_text(step.saved), visible(goes + why + held, 300)
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
