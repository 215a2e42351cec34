"""``treering doctor``: saves in flight and what dead ones left, in a folder where something seems stuck."""

from __future__ import annotations

from treering._cli.options import JSON, PATH, verb
from treering._cli.terminal import GOOD, NO, write_lines
from treering._inspect.doctor import diagnose
from treering._runs.reports import diagnose_run, holds_run
from treering._view.doctor_text import doctor_json, doctor_lines, run_doctor_json, run_doctor_lines


@verb(
    "treering doctor checkpoint",
    "treering doctor checkpoint --json | jq '.attempts[] | {attempt, life, advice}'",
    "watch treering doctor checkpoint",
)
@PATH
@JSON
def doctor(path: str, as_json: bool) -> int:
    """Show the state of the folder PATH: what is committed, which saves are in flight or dead, and what to do.

    PATH is the folder of a checkpoint, a leaves directory or a run; a save need not have been committed there yet. Of a
    run, every step is inspected, and folders that hold more than a checkpoint are reported. For a save by several
    processes it shows which of them have voted, failed or not arrived, and where they run. It also checks that the
    committed files exist with the size that the index gives; `treering verify` reads them.

    Nothing is locked, written or removed, so a running save is not disturbed. Exit code 0: there is nothing to do; 1:
    files are missing or damaged, or a dead save holds bytes; 2: PATH could not be inspected.
    """
    if holds_run(path):
        run = diagnose_run(path, diagnose)
        write_lines(run_doctor_json(run) if as_json else run_doctor_lines(run))
        return GOOD if run.ok else NO
    found = diagnose(path)
    write_lines(doctor_json(found) if as_json else doctor_lines(found))
    return GOOD if found.ok else NO
