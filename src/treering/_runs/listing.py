"""A run's folder -> its steps, what is known of each, and which of them its rules keep; without jax or numpy."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from treering._runs.listing_cache import cache_trouble
from treering._runs.policy import policy_of
from treering._runs.steps import Records, facts, records_of, step_path
from treering._values.near import near
from treering._view.run_text import RunListing, RunStep
from treering.errors import Format
from treering.retention import AnyRule, KeepBest, Policy, Verdict, retained


def listed_run(path: str | os.PathLike[str], *, shown: str | None = None) -> RunListing:
    """List the steps of a run with what is known of them, and what its own rules say of each.

    Args:
        path: the run's folder.
        shown: what the folder is called in the listing; None: as it was given.

    Raises:
        StoreFailed: the system refuses.

    Example:
        >>> import os, tempfile
        >>> import treering as tr
        >>> with tr.Run(os.path.join(tempfile.mkdtemp(), "run")) as run:
        ...     saved = [run.save(step, {"w": 1.5}) for step in (10, 20)]
        >>> [step.step for step in listed_run(run.path).steps]
        [10, 20]
    """
    records = records_of(Path(path))
    trouble = cache_trouble(Path(path))
    notes = [] if trouble is None else [trouble]
    try:
        rules = own_rules(records)
    except Format as error:
        rules = None
        notes.append(f"which steps stay cannot be told: {error.message}")
    for metric, close in unknown_metrics(rules, records).items():
        meant = f" (is it {close!r}?)" if close else ""
        notes.append(f"no step has the metric {metric!r}{meant}, so KeepBest({metric!r}) keeps all")
    verdicts = retained(rules, [facts(record) for record in records.steps])
    return listed(shown or os.fspath(path), Path(path), records, verdicts, notes=notes)


def own_rules(records: Records) -> Policy | None:
    """Return the rules that a run noted; None where it keeps all.

    Raises:
        Format: this version does not know them.
    """
    return None if records.keep is None else policy_of(records.keep)


def unknown_metrics(rules: Policy | None, records: Records) -> dict[str, str | None]:
    """Return the metrics that rules go by and no step has, each with the name that was probably meant.

    Without steps nothing is known, and nothing is returned.

    Example:
        >>> unknown_metrics(KeepBest("los"), Records(keep=None, save_every=None, steps=(), unreadable={}))
        {}
    """
    return unmeasured(rules, {name for record in records.steps for name in record.metrics}) if records.steps else {}


def unmeasured(rules: Policy | None, there: Collection[str]) -> dict[str, str | None]:
    """Return the metrics that rules go by and that are not there, each with the name that was probably meant.

    Example:
        >>> unmeasured(KeepBest("los"), ["loss"])
        {'los': 'loss'}
    """
    parts = rules.rules if isinstance(rules, AnyRule) else (rules,)
    wanted = [rule.metric for rule in parts if isinstance(rule, KeepBest) and rule.metric not in there]
    return {metric: near(metric, there) for metric in wanted}


def listed(
    shown: str,
    path: Path,
    records: Records,
    verdicts: Sequence[Verdict],
    *,
    keep: Policy | None = None,
    notes: Sequence[str] = (),
) -> RunListing:
    """Put what is known of the steps of a run, and what rules say of them, into a listing.

    Args:
        shown: what the folder is called.
        path: the folder.
        records: what is known of the steps.
        verdicts: what becomes of them.
        keep: the rules that said so, where they are not the run's own.
        notes: what is good to know beside.
    """
    of = {verdict.step: verdict for verdict in verdicts}
    steps = [
        RunStep(
            step=record.step,
            path=os.fspath(step_path(path, record.step)),
            saved=record.saved,
            nbytes=record.nbytes,
            seconds=record.seconds,
            metrics=record.metrics,
            temporary=record.temporary,
            kept=of[record.step].kept,
            reasons=of[record.step].reasons,
        )
        for record in records.steps
        if record.step in of
    ]
    unread = [f"step {step} cannot be read, and is not removed: {error}" for step, error in records.unreadable.items()]
    return RunListing(
        path=shown,
        steps=steps,
        keep=records.keep if keep is None else repr(keep),
        save_every=records.save_every,
        notes=(*notes, *unread),
    )
