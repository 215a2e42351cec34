"""The verbs that look at what a path holds, and at the steps of a run; and what all verbs share.

That is arguments and options, paths that may be those of a run, and how trees are drawn.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeAlias, TypeVar

import click

from treering._checkpoint.detect import Form, detect
from treering._checkpoint.forms import is_run, list_headers
from treering._cli.main import GOOD, NO, NOT_DONE, can_show, explain, explain_error, note, wants_color, write_lines
from treering._format.listing import describe_part
from treering._inspect.inspect import find_foreign_steps, list_steps
from treering._printable import printable, show_path
from treering._store.resolve import is_seen, is_taken, located, new_file_path, open_file, write_file
from treering._values.checkpoint_names import step_of_name
from treering._values.human import bytes_text, near, pluralize, steps_text
from treering._view import listings
from treering._view.plain import cut, json_document, members_of
from treering._view.rows import DEEPEST, USUAL_DEPTH, lay_out, leaves_of, nodes_of, weight_of
from treering._view.tree_text import ASCII, UNICODE, Style, tree_lines
from treering.errors import CorruptError, ExistsError, NotFoundError, UnsupportedError

if TYPE_CHECKING:
    from treering._format.listing import Listing
    from treering.rules import Policy

Verb: TypeAlias = Callable[..., int]

PATH = click.argument("path", type=click.Path(path_type=str))
RUN = click.argument("path", metavar="RUN", type=click.Path(path_type=str))
GLOBS = click.argument("globs", metavar="[GLOB]...", nargs=-1)
JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object for programs, with plain numbers.")


def verb(*examples: str) -> Callable[[Verb], click.Command]:
    """Make a function the command of its name, whose help ends with examples."""
    return click.command(epilog="\n".join(["\b", "Examples:", *(f"  {example}" for example in examples)]) + "\n")


def depth(usual: int, help_text: str) -> Callable[[Verb], Verb]:
    """Add ``--depth``, the levels of a tree that are shown."""
    levels = WholeNumber(0, DEEPEST)
    return click.option("--depth", type=levels, default=usual, show_default=True, metavar="N", help=help_text)


class WholeNumber(click.IntRange):
    """A whole number in a range, told in words that need no knowledge of types."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read the number, or fail with the range."""
        try:
            checked: int = super().convert(int(value), param, ctx)
        except (ValueError, click.BadParameter):
            upper = "on" if self.max is None else f"to {self.max}"
            self.fail(f"{str(value)!r} is not a whole number from {self.min} {upper}", param, ctx)
        return checked


class BestOf(click.ParamType[tuple[str, str]]):
    """A metric and which of its values is best, as ``accuracy:max``."""

    name = "metric"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """Read both, or fail with how to write them."""
        metric, _, mode = str(value).rpartition(":")
        if not metric or mode not in ("min", "max"):
            self.fail(f"{str(value)!r:.200} does not say which value is best: METRIC:min or METRIC:max", param, ctx)
        return metric, mode


T = TypeVar("T")


def read_latest(path: str, read: Callable[[str], T]) -> tuple[str, T]:
    """Read what stands at a path, of a run its latest step, which is said on stderr; return what was read, and of what.

    A step that goes meanwhile has a newer one beside it.

    Raises:
        NotFoundError: the run has no step yet; and as ``detect`` and ``read``.
        CorruptError: the index of its latest step is damaged; the hint names the step before it.
    """
    form = detect(path)
    if form is Form.RUN:
        from treering._runs.steps import of_latest

        what = "a run"
        try:
            step, found = of_latest(path, lambda latest: (os.fspath(latest), read(os.fspath(latest))))
        except CorruptError as error:
            if (told := _damaged_latest(path)) is None:
                raise
            raise told from error
    elif (steps := find_foreign_steps(path, form)) is not None:
        what, step = f"a folder of steps of {form.value}", os.fspath(steps.path_of(max(steps.names)))
        found = read(step)
    else:
        return path, read(path)
    note(f"{path!r} is {what}; this is its latest step, {os.path.basename(step)}")  # noqa: PTH119 - a text
    return step, found


def _damaged_latest(path: str) -> CorruptError | None:
    """Return the error that the index of a run's latest step is damaged; None where it is not."""
    from treering._runs.steps import records_of, step_path

    records = records_of(located(path))
    before = max((record.step for record in records.readable), default=-1)
    latest = max(records.unreadable, default=-1)
    if latest < before or not isinstance(error := records.unreadable.get(latest), CorruptError):
        return None
    hint = f"`treering verify {path!r}` says more"
    if before >= 0:
        hint = f"the step before it is {os.fspath(step_path(located(path), before))!r}; {hint}"
    return CorruptError(f"the newest step of {path!r}, {latest}, cannot be read: {error.message}", hint=hint)


def steps_at(path: str, steps: Sequence[int]) -> list[str]:
    """Return the paths of steps of a run, or in a folder of another program.

    Raises:
        NotFoundError: one is not there.
        UnsupportedError: the index of one cannot be read, or it is no run; and as ``detect``.
    """
    if (listing := list_steps(path)) is None:
        raise no_run(path)
    paths = {step.step: step.path for step in listing.steps}
    lost = [step for step in steps if step not in paths]
    if lost and listing.form == "run":
        from treering._runs.steps import records_of, step_path

        if (error := records_of(located(path)).unreadable.get(lost[0])) is not None:
            place = show_path(os.fspath(step_path(located(path), lost[0])))
            raise UnsupportedError(
                f"step {lost[0]} of {path!r} is there, and cannot be read: {error.message}",
                hint=f"see `treering verify {path!r}`; if it is lost, remove {place!r} and all below it yourself"
                if isinstance(error, CorruptError)
                else error.hint,
            )
    require_steps(path, list(paths), steps)
    return [paths[step] for step in steps]


def require_steps(path: str, there: Sequence[int], steps: Sequence[int]) -> None:
    """Refuse steps that a run does not have.

    Raises:
        NotFoundError: one is not there; the hint says which are.
    """
    if lost := [step for step in steps if step not in there]:
        hint = f"it has {steps_text(there)}" if there else "it has no step yet"
        raise NotFoundError(f"the run {path!r} has no step {lost[0]}", hint=hint)


def describe(path: str) -> str:
    """Say in a few words what stands at a path. Raises as ``detect``."""
    if (run := list_steps(path)) is not None:
        return f"run, {pluralize(len(run.steps), 'steps')}, {bytes_text(run.nbytes)}"
    listing = list_headers(path)
    count = sum(1 for _ in leaves_of(listing.root))
    return f"{listing.form}, {pluralize(count, 'leaves')}, {bytes_text(listing.file_bytes)}"


def require_run(path: str) -> None:
    """Refuse what is no run.

    Raises:
        UnsupportedError: it is something else; and as ``detect``.
    """
    if not is_run(path):
        raise no_run(path)


def no_run(path: str) -> UnsupportedError:
    """Return the error that a path is no run."""
    return UnsupportedError(f"{path!r} is not a run", hint="a run is the folder that treering.Run saves its steps in")


def style_of(stream: TextIO) -> Style:
    """Choose how a tree is drawn on a stream."""
    style, width = UNICODE if can_show("├└│─·…", stream) else ASCII, None
    if stream.isatty():
        import shutil  # what writes into a pipe starts sooner without it

        width = shutil.get_terminal_size().columns
    return dataclasses.replace(style, color=wants_color(stream), width=width)


def nothing_matches(path: str, globs: Sequence[str], root: Any) -> int:
    """Say that no leaf below ``root`` matches, and which keys were perhaps meant; return the exit code for that."""
    found = (near(glob, (key for key, _ in nodes_of(root) if key)) for glob in globs)
    close = list(dict.fromkeys(key for key in found if key))
    hint = f"treering ls {path!r} lists all keys"
    if close:
        hint = f"did you mean {' or '.join(map(repr, close))}?"
    elif any("*" in glob for glob in globs):
        hint = "'*' stays inside one part of a key; '**/NAME' looks at every depth"
    explain(f"nothing in {path!r} matches {' or '.join(map(repr, globs))}", hint)
    return NO


# ------------------------------------------------------------------------------------------- what lies at a path


_USUAL_DU_DEPTH = 2
_LONGEST = 1000


@verb(
    "treering inspect checkpoint",
    "treering inspect checkpoint --depth 1",
    "treering inspect model.safetensors",
    "treering inspect state.msgpack 'params/**/kernel'",
    "treering inspect checkpoint --json | python -m json.tool",
)
@PATH
@GLOBS
@JSON
@depth(USUAL_DEPTH, "Fold branches deeper than N levels into their totals.")
def inspect(path: str, globs: tuple[str, ...], as_json: bool, depth: int) -> int:
    """Show the tree in PATH: dtype, shape and size of every leaf, totals of every branch.

    PATH is the folder of a checkpoint, a leaves directory, a safetensors file, a msgpack file, or a run, whose latest
    step is shown. Only headers are read, so the time does not depend on the size. GLOBs select leaves, and everything
    below a branch that one matches: * matches inside a part of a key, ** any number of parts. Quote them, or the shell
    expands them.
    """
    path, listing = read_latest(path, list_headers)
    layout = lay_out(listing.root, globs=globs, depth=depth)
    size = listing.file_bytes
    if as_json:
        head = {"file": path, "file_bytes": size, "globs": globs, "depth": depth}
        write_lines(listings.json_lines(layout, {**head, **listings.origin_members(listing)}))
    elif layout.rows:
        style, notes = style_of(sys.stdout), listings.notes_of(listing)
        write_lines(tree_lines(layout, title=path, file_bytes=size, style=style, notes=notes))
    return GOOD if layout.rows else nothing_matches(path, globs, listing.root)


@verb(
    "treering ls checkpoint",
    "treering ls checkpoint 'params/**/kernel'",
    "treering ls model.safetensors --json | jq -r '.leaves[].key'",
)
@PATH
@GLOBS
@click.option("--sort", type=click.Choice(["key", "bytes"]), default="key", help="The order; bytes: the largest first.")
@JSON
def ls(path: str, globs: tuple[str, ...], sort: str, as_json: bool) -> int:
    """List the leaves in PATH, one a line: key, dtype, shape or value, bytes; of a run, its steps.

    PATH is the folder of a checkpoint, a leaves directory, a safetensors file, a msgpack file or a run. GLOBs select
    leaves, and everything below a branch that one matches: * matches inside a part of a key, ** any number of parts.
    Quote them, or the shell expands them. With GLOBs, the leaves of the latest step of a run are listed.
    """
    if not globs and (run := list_steps(path)) is not None:
        from treering._view.run_text import step_lines, steps_json

        if sort == "bytes":
            run = dataclasses.replace(run, steps=sorted(run.steps, key=lambda step: -step.nbytes))
        write_lines(steps_json(run) if as_json else step_lines(run, style_of(sys.stdout)))
        for told in () if as_json else [*run.notes, *([] if run.steps else ["the run has no step yet"])]:
            note(told)
        return GOOD
    path, listing = read_latest(path, list_headers)
    leaves = list(leaves_of(listing.root, globs))
    if sort == "bytes":
        leaves.sort(key=lambda pair: -weight_of(pair[1])[0])
    if as_json:
        write_lines(listings.key_json(leaves, {"file": path, "globs": globs, **listings.origin_members(listing)}))
    else:
        write_lines(listings.key_lines(leaves, style_of(sys.stdout)))
        if leaves or not globs:
            _note_unlisted(path, globs, listing)
    return GOOD if leaves or not globs else nothing_matches(path, globs, listing.root)


def _note_unlisted(path: str, globs: Sequence[str], listing: Listing) -> None:
    """Say on stderr what the list of leaves does not."""
    if listing.part:
        note(f"{path!r} is a part of a tree: {describe_part(listing.part)}")
    if listing.form != Form.CHECKPOINT.value:  # of other programs' files, what cannot be read
        for told in (each for each in listing.notes if not each.startswith("format: ")):
            note(told)
    for glob in globs or ("**",):
        if next(iter(leaves_of(listing.root, (glob,))), None) is None:
            note(f"nothing in {path!r} matches {glob!r}" if globs else f"the tree in {path!r} has no leaf")


@verb("treering du checkpoint", "treering du checkpoint --depth 4", "treering du state.msgpack 'params/**' --depth 3")
@PATH
@GLOBS
@JSON
@click.option(
    "--sort", type=click.Choice(["bytes", "key"]), default="bytes", help="The order; bytes: the largest first."
)
@depth(_USUAL_DU_DEPTH, "Add up everything deeper than N levels.")
def du(path: str, globs: tuple[str, ...], as_json: bool, sort: str, depth: int) -> int:
    """Show where the bytes in PATH are: the branches N levels down and the leaves above them, the largest first.

    PATH is the folder of a checkpoint, a leaves directory, a safetensors file, a msgpack file, or a run, whose latest
    step is shown; treering log shows the bytes of every step. The lines add up to the total, and no byte is counted
    twice. Names, headers, checksums and compression are not counted. GLOBs select leaves as in treering ls.

    Steps of an incremental run share files: two names, or more, for the same bytes on the disk. A last line then says
    how many bytes the files of all steps have by their names, and how many there are; the difference is what sharing
    saves. In a bucket each step has its own copies, and a last line says what superseded data wait for readers.
    """
    run, (path, listing) = path, read_latest(path, list_headers)
    layout = lay_out(listing.root, globs=globs, depth=depth)
    usage = listings.measure_usage(layout)
    if sort == "key":
        usage.sort(key=lambda share: share[0])
    waits = listing.notes if listing.form == Form.CHECKPOINT.value else ()
    if path != run and (step := step_of_name(os.path.basename(path))) is not None:  # noqa: PTH119 - a URL, perhaps
        from treering._runs.reports import sharing_of

        waits = [*waits, *filter(None, [sharing_of(run, step)])]
    if as_json:
        head = {"file": path, "globs": globs, "depth": depth}
        write_lines(listings.usage_json(layout, usage, head | {"notes": waits} if waits else head))
    elif layout.rows:
        write_lines(listings.usage_lines(layout, usage, ellipsis=style_of(sys.stdout).ellipsis))
        write_lines(map(printable, waits))
    return GOOD if layout.rows else nothing_matches(path, globs, listing.root)


@verb(
    "treering verify checkpoint",
    "treering verify checkpoint && cp -r checkpoint /backup/",
    "treering verify model.safetensors --json | jq .ok",
)
@PATH
@JSON
def verify(path: str, as_json: bool) -> int:
    """Read every byte of PATH and compare it with its checksums; every finding is one line.

    PATH is the folder of a checkpoint, a leaves directory, a safetensors file, a msgpack file, or a run, whose steps
    are all checked. Files of other programs, and msgpack, have no checksums: then only headers and sizes are checked,
    the answer says so, and exit code 0 says no more than that. A file that several steps of a run share is read once,
    and damage to it is damage to all of these steps, which the finding names. A step that a program holds, or that
    waits for on_commit, is checked like any other; verify holds and changes nothing. Exit code 0: PATH is whole; 1: it
    is damaged; 2: it could not be read.
    """
    from treering._inspect.verify import verify as check

    found = check(path, progress=True)
    if as_json:
        head = {"schema": "treering.verify/1"} | members_of(found, "path", "ok", "checked", "note", "leaves", "nbytes")
        head |= {} if found.steps is None else {"steps": found.steps}
        write_lines(json_document(head, findings=found.findings))
    else:
        lines = [str(found).splitlines()[0], *(f"  {finding}" for finding in found.findings)]
        if found.findings and found.note:
            lines.append(f"  note: {found.note}")
        write_lines(printable(cut(line, _LONGEST)) for line in lines)
    return GOOD if found.ok else NO


@verb(
    "treering diff before after",
    "treering diff before after --values",
    "treering diff run 100 200",
    "treering diff checkpoint model.safetensors",
    "treering diff before after --json | jq -r '.differences[].key'",
)
@click.argument("a", type=click.Path(path_type=str))
@click.argument("b", type=click.Path(path_type=str))
@click.argument("step", type=WholeNumber(0), required=False)
@click.option("--values", is_flag=True, help="Also read all arrays, and compare them bit for bit.")
@JSON
def diff(a: str, b: str, step: int | None, values: bool, as_json: bool) -> int:
    """Compare A and B: structure, kinds, dtypes, shapes, small values, metadata and checksums, one difference a line.

    With STEP, A is a run, and its steps B and STEP are compared.

    Each is the folder of a checkpoint, a leaves directory, a safetensors file, a msgpack file, or a run, whose latest
    step is compared; information that only one of the two forms stores is no difference. Exit code 0: there is no
    difference, as far as was compared, which the output says: without --values, arrays of checkpoints by their
    checksums, and those of other forms by dtype and shape; 1: they differ; 2: they could not be compared.
    """
    from treering._inspect.diff import diff as compare
    from treering._inspect.diff import sameness

    if step is None and b.isdecimal() and not is_seen(b):
        raise click.UsageError(f"there is no {b!r}; of a run, two steps are compared: treering diff RUN {b} STEP")
    if step is not None:
        a, b = steps_at(a, [WholeNumber(0).convert(b, None, click.get_current_context()), step])
    try:
        found = read_latest(a, lambda a: read_latest(b, lambda b: compare(a, b, values=values, progress=True))[1])[1]
    except CorruptError as error:
        # Damage is no answer to this question.
        explain_error(error)
        return NOT_DONE
    if as_json:
        head = {"schema": "treering.diff/1"} | members_of(found, "a", "b", "values", "checksums", "leaves")
        write_lines(json_document(head | {"same": not found}, differences=found))
    else:
        write_lines(map(str, found))
        if not found or not values:  # arrays may differ too
            write_lines([sameness(found, reading="--values")])
    return NO if found else GOOD


# ----------------------------------------------------------------------------------------------------------- a page


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
@click.option("-o", "--output", metavar="FILE", help="The page that is written.  [default: report.html]")
@click.option("--stats", is_flag=True, help="Also read all arrays, for statistics and histograms.")
@click.option(
    "--verify", is_flag=True, help="Also read every byte, compare it with its checksums, and show the damage."
)
@click.option("--open", "opens", is_flag=True, help="Open the page in the browser.")
@click.option("--serve", "serves", is_flag=True, help="Write nothing: serve a page to this machine that follows a run.")
@click.option(
    "--port", type=WholeNumber(0, 65535), metavar="N", help="The port of --serve; 0, the default: any free one."
)
@click.option("--overwrite", is_flag=True, help="Replace a file that is no report.")
def report(
    path: str, *, against: str | None, output: str | None, stats: bool, verify: bool, opens: bool, serves: bool,
    port: int | None, overwrite: bool,
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
        if output is not None or overwrite:
            raise click.UsageError(f"--serve and {'--overwrite' if overwrite else '-o'} exclude each other")
        _serve(path, {"against": against, "stats": stats, "verify": verify}, port=port or 0, opens=opens)
        return GOOD
    if port is not None:
        raise click.UsageError("--port is that of --serve")
    output = output or "report.html"
    place = new_file_path(output)
    if not overwrite:
        _require_report(output)
    document = gather(path, against=against, stats=stats, verify=verify)
    page = render(document)
    write_file(place, [page], len(page), unique=True)
    write_lines([printable(f"{show_path(output)}: report of {document['path']}, {bytes_text(len(page))}")])
    if opens:
        _open(output)
    return NO if any(table.get("state") == "bad" for table in document["tables"]) else GOOD


def _serve(path: str, asked: dict[str, Any], *, port: int, opens: bool) -> None:
    """Serve the page until Ctrl-C.

    Raises:
        UnsupportedError: the port cannot be used; and as `gather`, but where nothing is there yet.
    """
    from treering._report.contents import gather
    from treering._report.page import render
    from treering._report.serve import FollowedReport, ReportServer, serve, version_at

    try:
        gather(path)
    except NotFoundError as error:  # the training that is to be followed has saved nothing yet
        note(f"{error}; the page shows what is saved there later")
    followed = FollowedReport(
        lambda: gather(path, **asked), lambda document: render(document, live=True), lambda: version_at(path)
    )
    try:
        server = ReportServer(followed, port=port)
    except OSError as error:
        hint = "leave out --port to take one that is free"
        raise UnsupportedError(f"port {port} cannot be used: {error.strerror}", hint=hint) from error

    def tell(url: str) -> None:
        write_lines([printable(f"the report of {show_path(path)} is at {url} until Ctrl-C")])
        sys.stdout.flush()
        if opens:
            import webbrowser

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
    import webbrowser  # other verbs start sooner without it
    from pathlib import Path

    if "://" in output or not webbrowser.open(Path(output).absolute().as_uri()):
        note(f"no browser could be opened; the page is {output}")


# ------------------------------------------------------------------------------------------------- the steps of a run


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
    require_steps(path, sorted({*(record.step for record in records.readable), *records.unreadable}), keep_step)
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
    for told in () if as_json else listing.notes:
        note(told)
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
    write_lines([printable(f"removed step {step} of {show_path(path)}: {describe(path)}")])
    return GOOD
