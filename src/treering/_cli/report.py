"""``treering report``: what a checkpoint, a run or a file holds, as one HTML page."""

from __future__ import annotations

import sys
import webbrowser
from typing import Any

import click

from treering._cli.main import GOOD, NO, note, write_lines
from treering._cli.options import PATH, WholeNumber, verb
from treering._printable import show_path
from treering._store.resolve import is_taken, new_file_path, open_file, write_file
from treering._values.human import bytes_text
from treering.errors import ExistsError, UnsupportedError


@verb(
    "treering report checkpoint",
    "treering report run -o run.html --open",
    "treering report model.safetensors --stats",
    "treering report run/step_00002000 --against run/step_00001000",
    "treering report s3://bucket/run --verify",
    "treering report run --serve",
)
@PATH
@click.option("--against", metavar="OTHER", type=click.Path(path_type=str), help="Also show what changed since OTHER.")
@click.option(
    "-o", "--output", metavar="FILE", default="report.html", show_default=True, help="The page that is written."
)
@click.option("--stats", is_flag=True, help="Also read all arrays, for statistics and histograms.")
@click.option(
    "--verify", is_flag=True, help="Also read every byte, compare it with its checksums, and show the damage."
)
@click.option("--open", "opens", is_flag=True, help="Open the page in the browser.")
@click.option("--serve", "serves", is_flag=True, help="Write nothing: serve a page to this machine that follows a run.")
@click.option(
    "--port", type=WholeNumber(0, 65535), default=0, metavar="N", help="The port of --serve; 0: any free one."
)
@click.option("--overwrite", is_flag=True, help="Replace a file that is no report.")
def report(
    path: str, *, against: str | None, output: str, stats: bool, verify: bool, opens: bool, serves: bool, port: int,
    overwrite: bool,
) -> int:  # fmt: skip
    """Write a page about PATH: where its bytes are, every leaf, how arrays are split, and the history of a run.

    PATH is the folder of a checkpoint, a leaves directory, a run, or a file of any form that treering reads. The page
    is one file that loads nothing from elsewhere. Headers are read and no array, unless --against, --stats or --verify
    ask for it; of a bucket --against compares headers alone, unless --stats is given. Exit code 1: --verify found
    damage, which the page shows.

    With --serve the page is served on 127.0.0.1, to those who have the address that is printed, until Ctrl-C; a new
    step of the run appears in it by itself.
    """
    from treering._report.contents import gather
    from treering._report.page import render

    if serves:
        _serve(path, {"against": against, "stats": stats, "verify": verify}, port=port, opens=opens)
        return GOOD
    place = new_file_path(output)
    if not overwrite:
        _require_report(output)
    document = gather(path, against=against, stats=stats, verify=verify)
    page = render(document)
    write_file(place, [page], len(page), unique=True)
    write_lines([f"{show_path(output)}: report of {document['path']}, {bytes_text(len(page))}"])
    if opens:
        _open(output)
    return NO if any(table.get("state") == "bad" for table in document["tables"]) else GOOD


def _serve(path: str, asked: dict[str, Any], *, port: int, opens: bool) -> None:
    """Serve the page until Ctrl-C.

    Raises:
        UnsupportedError: the port cannot be used; and as `gather`, so that a wrong path ends the program.
    """
    from treering._report.contents import gather
    from treering._report.page import render
    from treering._report.serve import FollowedReport, ReportServer, serve, version_at

    gather(path)
    followed = FollowedReport(
        lambda: gather(path, **asked), lambda document: render(document, live=True), lambda: version_at(path)
    )
    try:
        server = ReportServer(followed, port=port)
    except OSError as error:
        hint = "leave out --port to take one that is free"
        raise UnsupportedError(f"port {port} cannot be used: {error.strerror}", hint=hint) from error

    def tell(url: str) -> None:
        write_lines([f"the report of {show_path(path)} is at {url} until Ctrl-C"])
        sys.stdout.flush()
        if opens:
            webbrowser.open(url)

    serve(server, tell=tell)


def _require_report(output: str) -> None:
    """Refuse to replace what is not a report of treering.

    Raises:
        ExistsError: something else is there.
    """
    from treering._report.page import MARK

    if not is_taken(output):
        return
    with open_file(output) as file:
        if file.read(0, min(file.size, len(MARK))) != MARK.encode():
            raise ExistsError(f"{output!r} is there, and is no report", hint="pass another -o, or --overwrite")


def _open(output: str) -> None:
    from pathlib import Path

    if "://" in output or not webbrowser.open(Path(output).absolute().as_uri()):
        note(f"no browser could be opened; the page is {output}")
