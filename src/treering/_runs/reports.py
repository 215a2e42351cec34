"""A run's folder -> its steps with what its rules say of each.

Neither jax nor numpy is needed.

The rules are read from their text, and compared with the metrics that there are. The text is Python's, but nothing is
evaluated: what is not the name of a rule, a number or a text is refused.
"""

from __future__ import annotations

import ast
import dataclasses
import datetime
import functools
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from treering import retention
from treering._checkpoint.forms import list_headers
from treering._foreign.foreign_tree import reading_partly
from treering._runs.folder import NOT_READ
from treering._runs.leases import held_in
from treering._runs.steps import Records, records_of, step_path
from treering._store.api import Entry
from treering._store.resolve import located, opened_store, store_at
from treering._values.checkpoint_names import is_data, step_of_name
from treering._values.human import bytes_text, pluralize
from treering._values.outline import Outline
from treering._view.plain import members_of
from treering._view.rows import leaves_of, weight_of
from treering._view.run_text import RunListing, RunStep, log_lines, run_outline
from treering.errors import FormatError, NotFoundError, TreeringError
from treering.rules import Policy, Verdict, retained, unknown_metrics

if TYPE_CHECKING:
    from treering._foreign.foreign_tree import ForeignSteps
    from treering._runs.run_state import RunState


def sharing_of(path: str | os.PathLike[str], step: int) -> str | None:
    """Say how many bytes the data files of a run have by all their names, and how many there are.

    None where no file has several names in it, and where the store does not tell.

    Args:
        path: the run's folder.
        step: a step, of which it says what no other step has.

    Raises:
        OSError: the store refuses.
    """
    names: list[tuple[int, Entry]] = []
    with opened_store(path) as store:
        for entry in () if store.asks_by_request else store.list("step_"):
            folder, _, name = entry.name.partition("/")
            if (number := step_of_name(folder)) is not None and is_data(name):
                names.append((number, entry))
    holders: dict[Entry, set[int]] = {}
    for number, entry in names:
        holders.setdefault(entry._replace(name=""), set()).add(number)
    apparent, own = sum(entry.size for _, entry in names), sum(entry.size for entry in holders)
    if apparent == own:
        return None
    alone = sum(entry.size for entry, steps in holders.items() if steps == {step})
    count = pluralize(len({number for number, _ in names}), "steps")
    here = f"{bytes_text(alone)} of these in step {step} alone"
    return f"data files of {count}: {bytes_text(apparent)} by their names, {bytes_text(own)} on the disk, {here}"


def list_run(path: str | os.PathLike[str], *, shown: str | None = None) -> RunListing:
    """List the steps of a run with what is known of them, and what its own rules say of each.

    Args:
        path: the run's folder.
        shown: what the folder is called in the listing; None: as it was given.

    Raises:
        StoreError: the system refuses.

    Example:
        >>> import os, tempfile
        >>> import treering as tr
        >>> with tr.Run(os.path.join(tempfile.mkdtemp(), "run")) as run:
        ...     saved = [run.save(step, {"w": 1.5}) for step in (10, 20)]
        >>> [step.step for step in list_run(run.path).steps]
        [10, 20]
    """
    records = records_of(located(path))
    notes = [] if records.trouble is None else [records.trouble]
    rules = None
    try:
        rules = own_rules(records)
    except FormatError as error:
        notes.append(f"the retention rules cannot be read: {error.message}")
    for metric, close in unknown_metrics(rules, records.steps).items():
        meant = f" (is it {close!r}?)" if close else ""
        notes.append(f"no step has the metric {metric!r}{meant}, so KeepBest({metric!r}) keeps all")
    verdicts = retained(rules, records.steps)
    listing = list_records(shown or os.fspath(path), located(path), records, verdicts, held=held_in(located(path)))
    return dataclasses.replace(listing, notes=(*notes, *listing.notes))


def list_foreign_steps(path: str | os.PathLike[str], steps: ForeignSteps) -> RunListing:
    """List the steps in a folder of another program; bytes are those of their leaves.

    Raises:
        StoreError: the system refuses.
    """
    found: list[RunStep] = []
    notes = [f"format: {steps.form.version}"]
    for step in steps.names:
        place = os.fspath(steps.path_of(step))
        try:
            told = steps.describe(step)
            with reading_partly():
                nbytes = sum(weight_of(leaf)[0] for _, leaf in leaves_of(list_headers(place).root))
        except (*NOT_READ, NotFoundError) as error:
            notes.append(f"step {step} cannot be read: {error}")
            continue
        notes += [f"step {step}: {loss}" for loss in told.losses.values()]
        found.append(RunStep(step=step, path=place, saved=told.saved, nbytes=nbytes, metrics=told.metrics))
    return RunListing(path=os.fspath(path), steps=found, notes=notes, form=steps.form.value)


def list_records(
    shown: str, path: Path, records: Records, verdicts: Sequence[Verdict], *, held: Mapping[int, str] | None = None
) -> RunListing:
    """Put what is known of the steps of a run, and what rules say of them, into a listing.

    Args:
        shown: what the folder is called.
        path: the folder.
        records: what is known of the steps.
        verdicts: what becomes of them.
        held: the steps that somebody holds, with who does.
    """
    of = {verdict.step: verdict for verdict in verdicts}
    of |= {one.step: Verdict(step=one.step, kept=True, reasons=(_PASSED,)) for one in records.passed}
    same = "step", "saved", "nbytes", "seconds", "metrics", "temporary"
    steps = []
    for one in records.readable:
        if (verdict := of.get(one.step)) is not None:
            told = members_of(one, *same) | members_of(verdict, "kept", "reasons")
            place, by = os.fspath(step_path(path, one.step)), (held or {}).get(one.step, "")
            steps.append(RunStep(path=place, held=by, **told))
    unread = [f"step {step} cannot be read, and is not removed: {error}" for step, error in records.unreadable.items()]
    return RunListing(path=shown, steps=steps, keep=records.keep, save_every=records.save_every, notes=unread)


def run_text(run: RunState) -> str:
    """Return what ``print(run)`` prints, as ``treering log`` does; by the rules of this program, not of the last one.

    Raises:
        StoreError: the system refuses to read the folder.
    """
    return "\n".join(log_lines(_list_state(run), now=run.now()))


def run_state_outline(run: RunState, title: str) -> Outline:
    """Return what a notebook shows of a run: it reads the folder on a disk, and asks a bucket for nothing."""
    told = [("status", str(run.outcomes.status()))]
    try:
        if not store_at(run.path).asks_by_request:
            found = run_outline(_list_state(run), now=run.now())
            return dataclasses.replace(found, notes=[*found.notes, *told])
        told.append(("note", "print(run) asks the bucket for its steps"))
    except (TreeringError, OSError) as error:
        told.append(("note", f"its steps cannot be listed: {error}"))
    return Outline(title=title, notes=told)


def _list_state(run: RunState) -> RunListing:
    records = records_of(run.path)
    if run.keep is None and run.save_every is None:  # none that saves: what the last one noted
        return list_run(run.path, shown=run.shown)
    listing = list_records(run.shown, run.path, records, retained(run.keep, records.steps), held=held_in(run.path))
    return dataclasses.replace(listing, keep=run.keep_text or "every step", save_every=run.save_every_text)


_RULES: Final[Mapping[str, Callable[..., Policy]]] = {
    name: getattr(retention, name) for name in retention.__all__ if name.startswith("Keep")
}
_LONGEST: Final = 10_000
_PASSED: Final = "it was passed over at a resume, and counts for no rule"
_HINT: Final = (
    "rules are KeepLast(3), KeepLatest(duration=3600), KeepEvery(steps=1000), KeepEvery(interval=3600), "
    "KeepBest('loss'), KeepNear([100, 5000]), KeepSteps(100)"
)
_OWN_HINT: Final = "run.gc() applies rules of a program's own; `treering gc --keep RULES` goes by others"


def policy_of(text: str) -> Policy:
    """Read a rule, or several that are joined with ``|``.

    Raises:
        FormatError: it is none, or one that this version does not know.

    Example:
        >>> policy_of("KeepLast(3) | KeepBest('loss', mode='max')")
        KeepLast(3) | KeepBest('loss', mode='max')
        >>> policy_of("KeepEvery(interval=timedelta(hours=1))")
        KeepEvery(interval=timedelta(hours=1))
    """
    try:
        if len(text) > _LONGEST:
            raise SyntaxError  # noqa: TRY301 - said as one error below
        parsed = ast.parse(text.strip(), mode="eval").body
        rules = []
        while isinstance(parsed, ast.BinOp) and isinstance(parsed.op, ast.BitOr):
            rules.append(_rule(parsed.right))
            parsed = parsed.left
        rules.append(_rule(parsed))
        return functools.reduce(operator.or_, reversed(rules))
    except TreeringError as error:
        raise FormatError(f"{text!r:.200} is not a rule: {error.message}", hint=error.hint or _HINT) from error
    except (SyntaxError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise FormatError(f"{text!r:.200} is not a rule that this version knows", hint=_HINT) from error


def own_rules(records: Records) -> Policy | None:
    """Return the rules that a run noted; None where it keeps all.

    Raises:
        FormatError: this version does not know them.
    """
    try:
        return None if records.keep is None else policy_of(records.keep)
    except FormatError as error:
        error.hint = _OWN_HINT
        raise


def _rule(node: ast.expr) -> Policy:
    match node:
        case ast.Call(func=ast.Name(id=name), args=places, keywords=named) if name in _RULES:
            return _RULES[name](*map(_value, places), **_named(named))
    raise SyntaxError


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Call(func=ast.Name(id="timedelta"), args=[], keywords=named):
            return datetime.timedelta(**_named(named))
    return ast.literal_eval(node)


def _named(keywords: list[ast.keyword]) -> dict[str, Any]:
    # Without a name it is ** of something, which no rule's text has.
    return {str(keyword.arg): _value(keyword.value) for keyword in keywords}
