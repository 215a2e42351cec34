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
    """Say what stands in the folder PATH, which saves into it are in flight or dead, and what to do about each.

    PATH is a checkpoint's folder, a leaves directory or a run, also one in which no save ever ended; of a run the
    folder of every step is looked at, and those in which there is more than a checkpoint are told of. Of a save by
    several processes it says which of them have handed in their part, failed or not come, and where they run. That the
    files of the committed state are there, and as large as the index says, is looked at too; `treering verify` reads
    them.

    Nothing is locked, written or removed: a save that is running does not notice. Exit code 0: nothing has to be done;
    1: files are missing or damaged, or a dead save holds bytes; 2: it could not be looked at.
    """
    if holds_run(path):
        run = diagnose_run(path, diagnose)
        write_lines(run_doctor_json(run) if as_json else run_doctor_lines(run))
        return GOOD if run.ok else NO
    found = diagnose(path)
    write_lines(doctor_json(found) if as_json else doctor_lines(found))
    return GOOD if found.ok else NO
