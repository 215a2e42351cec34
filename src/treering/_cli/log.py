"""``treering log``: the steps of a run, and what is known of each."""

from __future__ import annotations

import sys
import time

import click

from treering._cli.output import write_lines
from treering._cli.run_path import require_run
from treering._cli.terminal import GOOD, look_of


@click.command(
    epilog="\b\nExamples:\n"
    "  treering log run\n"
    "  treering log run --json | jq -r '.steps[] | select(.kept | not) | .path'\n"
)
@click.argument("path", metavar="RUN", type=click.Path(path_type=str))
@click.option("--json", "as_json", is_flag=True, help="One JSON object for programs, with plain numbers.")
def log(path: str, as_json: bool) -> int:
    """Show the steps of RUN, the newest first: age, bytes, how long the save took, metrics, and which rule keeps it.

    RUN is the folder that treering.Run saves its steps in. A step that no rule keeps goes when the next one is saved.
    """
    require_run(path)
    from treering._runs.reports import listed_run
    from treering._view.run_json import log_json
    from treering._view.run_text import log_lines

    listing = listed_run(path)
    now = time.time()
    write_lines(log_json(listing, now=now) if as_json else log_lines(listing, now=now, look=look_of(sys.stdout)))
    return GOOD
