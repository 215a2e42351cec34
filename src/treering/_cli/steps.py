"""``treering log`` and ``gc``: the steps of a run, which of them the rules keep, and the removal of the others."""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
import time
from typing import TYPE_CHECKING, Literal

import click

from treering._cli.main import GOOD, NO, write_lines
from treering._cli.options import (
    JSON,
    RUN,
    BestOf,
    WholeNumber,
    describe,
    list_steps,
    no_run,
    require_run,
    steps_at,
    style_of,
    verb,
)
from treering._store.resolve import located

if TYPE_CHECKING:
    from treering.rules import Policy

_STAYS = "no rule keeps it, but another process is saving to it, or has saved it again"


@verb("treering log run", "treering log run --json | jq -r '.steps[] | select(.kept | not) | .path'")
@RUN
@JSON
def log(path: str, as_json: bool) -> int:
    """Show the steps of RUN, the newest first: age, bytes, duration of the save, metrics, and which rule keeps it.

    RUN is the folder in which treering.Run saves its steps, or the root of Orbax's CheckpointManager. A step that no
    rule keeps is removed when the next one is saved. It stays while a program holds it, by Run.hold or Run.watch: its
    line says which one, and until when. It also stays until the run's on_commit function was called for it, which
    treering gc shows. Where steps share files, each counts all its bytes; treering du shows how many there are.
    """
    if (listing := list_steps(path)) is None:
        raise no_run(path)
    from treering._view.run_text import log_json, log_lines

    now = time.time()
    write_lines(log_json(listing, now=now) if as_json else log_lines(listing, now=now, style=style_of(sys.stdout)))
    return GOOD


@verb(
    "treering gc run",
    "treering gc run --keep-last 3 --keep-best loss:min",
    "treering gc run --keep \"KeepLast(3) | KeepBest('accuracy', mode='max')\" --yes",
)
@RUN
@click.option("--keep-last", type=WholeNumber(1), metavar="N", help="Keep the last N steps.")
@click.option("--keep-every", type=WholeNumber(1), metavar="N", help="Keep the steps that are multiples of N.")
@click.option(
    "--keep-best", type=BestOf(), multiple=True, metavar="METRIC:min|max", help="Keep the step that is best in METRIC."
)
@click.option("--keep-step", type=WholeNumber(0), multiple=True, metavar="STEP", help="Keep this step.")
@click.option("--keep", metavar="RULES", help="Keep what these rules keep, in Python's syntax.")
@click.option("--yes", is_flag=True, help="Remove the steps that no rule keeps; without it nothing changes.")
@JSON
def gc(
    path: str,
    *,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: tuple[tuple[str, Literal["min", "max"]], ...],
    keep_step: tuple[int, ...],
    keep: str | None,
    yes: bool,
    as_json: bool,
) -> int:
    """Show which steps of RUN would be removed, and which rule keeps each of the others; with --yes, remove them.

    Without options, the rules of the run apply, else those that you give: a step stays if any rule keeps it. The newest
    always stays. So do a step that a program holds, by Run.hold or Run.watch, until it lets go of it or has been dead
    for about a minute, and one for which the run's on_commit function was not called yet; the line of such a step says
    so. A file that steps share goes with the last of them, so what a removed step had is not always free afterwards.

    Only files of treering are removed; a removal that was interrupted is completed, and what dead processes left behind
    goes once it is old. Exit code 1: a step could not be removed, because another process is saving to it.
    """
    require_run(path)
    from treering._runs.gc import collect, judge, spare
    from treering._runs.reports import list_records, own_rules, policy_of
    from treering._runs.steps import records_of, steps_of
    from treering._view.run_text import gc_json, gc_lines
    from treering.errors import NotFoundError
    from treering.rules import KeepBest, KeepEvery, KeepLast, KeepSteps, unknown_metrics

    given: list[Policy] = [KeepBest(metric, mode=mode) for metric, mode in keep_best]
    given += [KeepLast(keep_last)] if keep_last else []
    given += [KeepEvery(steps=keep_every)] if keep_every else []
    given += [KeepSteps(*keep_step)] if keep_step else []
    given += [policy_of(keep)] if keep is not None else []
    records = records_of(located(path))
    chosen = functools.reduce(operator.or_, given) if given else None
    for metric, close in unknown_metrics(chosen, records.steps).items():
        # A slip of the hand: all would stay.
        hint = f"did you mean {close!r}?" if close else "`treering log` shows the metrics"
        raise NotFoundError(f"no step of {path!r} has the metric {metric!r}", hint=hint)
    rules = own_rules(records) if chosen is None else chosen
    verdicts = (collect if yes else judge)(located(path), rules)
    there = steps_of(located(path)) if yes else ()
    stayed = [verdict.step for verdict in verdicts if not verdict.kept and verdict.step in there]
    verdicts = spare(verdicts, dict.fromkeys(stayed, _STAYS))
    records = records if chosen is None else dataclasses.replace(records, keep=repr(chosen))
    listing = list_records(path, located(path), records, verdicts)
    lines = gc_lines(listing, removed=yes, style=style_of(sys.stdout))
    write_lines(gc_json(listing, removed=yes) if as_json else lines)
    return NO if stayed else GOOD


@verb("treering rm run 300")
@RUN
@click.argument("step", type=WholeNumber(0))
def rm(path: str, step: int) -> int:
    """Remove one STEP of RUN, whatever its rules say. Only files of treering are removed."""
    require_run(path)
    from treering._runs.gc import remove_steps

    steps_at(path, [step])
    remove_steps(located(path), [step])
    write_lines([f"removed step {step} of {path}: {describe(path)}"])
    return GOOD
