"""A run of this process as lines for people: what is known of each step, and what the run's own rules say of it."""

from __future__ import annotations

import dataclasses

from treering._runs.listing import listed
from treering._runs.run_state import RunState
from treering._runs.steps import facts, records_of
from treering._view.run_text import log_lines
from treering.retention import retained


def run_text(run: RunState) -> str:
    """Return what ``print(run)`` prints, as ``treering log`` does; by the rules of this program, not of the last one.

    Raises:
        StoreFailed: the system refuses to read the folder.
    """
    records = records_of(run.path)
    verdicts = retained(run.keep, [facts(record) for record in records.steps])
    listing = listed(run.shown, run.path, records, verdicts)
    listing = dataclasses.replace(listing, keep=run.keep_text, save_every=run.save_every_text)
    return "\n".join(log_lines(listing, now=run.now()))
