"""The demo as it is told: train, save, kill, resume on another mesh, damage, and the table of what was proved.

The arrays live in processes of their own; this one only tells, looks into files, and imports no jax.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from treering._cli.demo import FILES
from treering._cli.demo.children import Child, Failed
from treering._cli.demo.display import TrainingDisplay, curve
from treering._cli.demo.evidence import Evidence, Proof, compared
from treering._cli.terminal import can_show, look_of
from treering._format.records import LeafRecord
from treering._ops.inspect import inspect, listing_of
from treering._ops.open_leaves import open_leaves
from treering._ops.verify import verify
from treering._values.human import bytes_text, count_text, duration_text, rate_text
from treering._values.keys import Glob
from treering._view.rows import lay_out
from treering._view.tree_text import tree_lines
from treering.errors import Corrupt

__all__ = ["tell"]

_SHOWN = ("params", "adam", "key", "step")
"""Branches of the checkpoint that the story shows."""
_THREE_LINES = (
    "import treering as tr",
    'tr.save("checkpoint", state)',
    'state = tr.load("checkpoint", like=state)',
)
"""What a newcomer writes."""

_LAST_STEPS = 5
"""Steps at the end whose mean loss counts: single steps are noisy."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """Where the story is told and where its files go."""

    console: Console
    folder: Path
    kept: bool
    symbols: bool
    """Whether the output can show box drawing and check marks."""

    @property
    def checkpoint(self) -> Path:
        """Where the state is saved."""
        return self.folder / FILES[0]

    def chapter(self, number: int, title: str) -> None:
        self.console.print()
        self.console.print(Text(f"{number}  {title}", style="bold"))

    def say(self, line: str) -> None:
        self.console.print(Text(f"   {line}"), soft_wrap=True)

    def quote(self, line: str, style: str) -> None:
        """Print a line that may be long: wrapped below itself on a terminal, whole elsewhere."""
        if self.console.is_terminal:
            self.console.print(Padding(Text(line, style=style), (0, 0, 0, 5)))
        else:
            self.console.print(Text(f"     {line}"), soft_wrap=True)


def tell(console: Console, *, seconds: float, folder: Path, kept: bool) -> list[Proof]:
    """Run the whole demo, with ``seconds`` of training; returns every proof, held or not.

    Its files are left in ``folder``; ``kept`` says whether the caller leaves that folder.
    """
    stage = _Stage(console=console, folder=folder, kept=kept, symbols=can_show("✓━├…µ", sys.stdout))
    stage.console.print(Text("treering demo", style="bold cyan").append("  a training run, saved, killed, resumed"))
    proofs: list[Proof] = []
    try:
        trained = _train_and_kill(stage, seconds)
        proofs += [_loss_fell(trained.losses), _kill_did_no_harm(stage, trained)]
        proofs += _resume(stage, trained.seen)
        proofs += _damage(stage)
    except Failed as failure:
        stage.quote(str(failure), "red")
        proofs.append(Proof(claim="Every process does its part", held=False, detail=str(failure)))
    _close(stage, proofs)
    return proofs


@dataclasses.dataclass(slots=True, kw_only=True)
class _Trained:
    """What is known of a training run that was killed."""

    losses: list[float] = dataclasses.field(default_factory=list)
    """Of every step up to the last save."""
    saves: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """The saves that were acknowledged."""
    seen: Evidence | None = None
    """The state of the last acknowledged save."""
    process: int = 0
    """The process that trained."""
    code: int = 0
    """How it ended."""
    halfway: dict[str, Any] = dataclasses.field(default_factory=dict)
    """How far the last save was when it was killed."""


def _train_and_kill(stage: _Stage, seconds: float) -> _Trained:
    stage.chapter(1, "Train a character-level transformer on eight devices")
    trained = _Trained()
    with (
        Child("treering._cli.demo.train", os.fspath(stage.checkpoint), str(seconds)) as child,
        TrainingDisplay(stage.console, seconds, blocks=stage.symbols) as display,
    ):
        trained.process = child.number
        for event in child.events():
            _take_in(stage, trained, display, event)
            if event["event"] == "halfway":
                trained.halfway = event
                trained.code = child.kill()
                break
    if not trained.halfway or trained.seen is None:
        raise Failed("the training process ended before its last save")
    losses, drawn = trained.losses, f"   {curve(trained.losses)}" if stage.symbols else ""
    stage.say(f"{len(losses)} steps: loss {losses[0]:.2f} to {_final(losses):.2f} nats a character{drawn}")
    _show_saves(stage, trained)
    return trained


def _take_in(stage: _Stage, trained: _Trained, display: TrainingDisplay, event: dict[str, Any]) -> None:
    """Take in what the training process tells."""
    match event["event"]:
        case "ready":
            stage.say(
                f"{count_text(event['parameters'])} parameters and Adam, cut over a mesh of 4 x 2 host devices; "
                f"{count_text(event['characters'])} characters of Python's own help"
            )
        case "step":
            if not trained.losses:
                display.compiled()
            trained.losses.append(event["loss"])
            display.show(event["loss"])
        case "saved":
            trained.saves.append(event)
            if "evidence" in event:
                trained.seen = Evidence(**event["evidence"])


def _show_saves(stage: _Stage, trained: _Trained) -> None:
    stage.chapter(2, "Save the whole state, and be killed in the middle of a save")
    listing = listing_of(stage.checkpoint)
    size, last = listing.file_bytes, trained.saves[-1]
    stage.say('tr.save("checkpoint", state, overwrite=True)')
    stage.say(
        f"{len(trained.saves)} saves of {bytes_text(size)}; the last one, of step {last['step']}, took "
        f"{duration_text(last['seconds'])}, {rate_text(size, last['seconds'])}, and is safe on the disk"
    )
    look = dataclasses.replace(look_of(sys.stdout), width=stage.console.width - 3)
    layout = lay_out(listing.root, globs=[Glob.parse(glob) for glob in _SHOWN], depth=2)
    stage.console.print()
    stage.say(f"$ treering inspect {FILES[0]} {' '.join(_SHOWN)} --depth 2")
    for line in tree_lines(layout, title=FILES[0], file_bytes=size, look=look):
        stage.console.print(Text.from_ansi(f"   {line}"), soft_wrap=True)
    stage.console.print()
    done, total = bytes_text(trained.halfway["done"]), bytes_text(trained.halfway["total"])
    stage.say(
        f"Process {trained.process} was saving step {trained.halfway['step']} and had written {done} of {total} "
        f"when SIGKILL ended it. In the folder now:"
    )
    named = {file.name for file in listing.files}
    for path in sorted(stage.checkpoint.iterdir()):
        what = f"of step {last['step']}" if path.name in named else "of the save that was killed"
        stage.say(f"  {bytes_text(path.stat().st_size):>8}  {_short(path.name)}  {what}")


def _kill_did_no_harm(stage: _Stage, trained: _Trained) -> Proof:
    found = verify(stage.checkpoint)
    step, saved = inspect(stage.checkpoint).leaves["step"].value, trained.saves[-1]["step"]
    stage.say(f"$ treering verify {FILES[0]}")
    stage.quote(str(found).replace(os.fspath(stage.checkpoint), FILES[0]), "green" if found else "red")
    return Proof(
        claim="A kill in the middle of a save harms nothing",
        held=found.ok and step == saved,
        detail=f"step {saved}, the last that was acknowledged, is whole" if found else str(found),
    )


def _resume(stage: _Stage, here: Evidence | None) -> list[Proof]:
    stage.chapter(3, "Resume in a fresh process, on two devices")
    there: Evidence | None = None
    seconds = 0.0
    losses: list[float] = []
    saved: dict[str, Any] = {}
    with (
        _patience(stage, "a new Python starts, loads and compiles ..."),
        Child("treering._cli.demo.resume", os.fspath(stage.checkpoint)) as child,
    ):
        for event in child.events():
            match event["event"]:
                case "loaded":
                    there, seconds = Evidence(**event["evidence"]), event["seconds"]
                case "step":
                    losses.append(event["loss"])
                case "saved":
                    saved = event
    if here is None or there is None or not saved:
        raise Failed("the process that resumed did not get to its end")
    size = listing_of(stage.checkpoint).file_bytes
    stage.say('tr.load("checkpoint", like, shardings=rules, mesh=mesh)')
    stage.say(
        f"process {there.process} loaded {bytes_text(size)} in {duration_text(seconds)}, {rate_text(size, seconds)}, "
        f"checked, from the mesh {here.mesh} onto {there.mesh}"
    )
    stage.say(f"its next loss  {there.next_loss}")
    stage.say(f"ours           {here.next_loss}")
    steps = " ".join(f"{loss:.3f}" for loss in losses)
    stage.say(f"{len(losses)} more steps there, loss {steps}; then it saved step {saved['step']} over the old one")
    return [*compared(here, there), _nothing_left(stage)]


def _nothing_left(stage: _Stage) -> Proof:
    """Prove that the save after the kill swept away what the killed one had left."""
    named = {file.name for file in listing_of(stage.checkpoint).files}
    left = sorted({path.name for path in stage.checkpoint.iterdir()} - named)
    return Proof(
        claim="The next save sweeps up",
        held=not left,
        detail=f"{left[0]} is still there" if left else f"{len(named)} files in the folder, each of them needed",
    )


def _damage(stage: _Stage) -> list[Proof]:
    stage.chapter(4, "Flip one bit, and be told which leaf it hit")
    leaves = inspect(stage.checkpoint).leaves
    key, leaf = max(leaves.items(), key=lambda item: item[1].nbytes)
    file, place = stage.checkpoint / str(leaf.file), (leaf.offset or 0) + leaf.nbytes // (2 * leaf.chunks)
    _flip_bit(file, place)
    found = verify(stage.checkpoint)
    stage.say(f"one bit of byte {place:,} of {_short(file.name)} flipped")
    stage.say(f"$ treering verify {FILES[0]}")
    for finding in found.findings:
        stage.quote(str(finding).replace(file.name, _short(file.name)), "yellow")
    complaint = _complaint(stage.checkpoint, leaf)
    stage.say("and a load of that leaf:")
    stage.quote(complaint.replace(file.name, _short(file.name)) or "no complaint", "yellow")
    _flip_bit(file, place)
    mended = verify(stage.checkpoint).ok
    stage.say("the bit flipped back: " + ("whole again" if mended else "still damaged"))
    named = [finding.key for finding in found.findings] == [key]
    return [
        Proof(
            claim="A flipped bit is found and named",
            held=named and bool(complaint) and mended,
            detail=f"one of {8 * leaf.nbytes:,} bits of {key}" if named else f"{key} was hit, verify says {found}",
        )
    ]


def _flip_bit(file: Path, place: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ 1]))


def _short(name: str) -> str:
    """Shorten the name of a data file: sixteen digits say nothing to a reader."""
    parts = name.split("-")
    return f"{parts[0]}-{parts[1][:4]}...{parts[-1][5:]}" if name.startswith("data-") else name


def _close(stage: _Stage, proofs: list[Proof]) -> None:
    table = Table.grid(padding=(0, 2))
    yes, no = ("✓", "✗") if stage.symbols else ("ok", "NO")
    for proof in proofs:
        mark = Text(yes, style="bold green") if proof.held else Text(no, style="bold red")
        table.add_row(mark, Text(proof.claim), Text(proof.detail, style="dim"))
    stage.console.print()
    frame = box.ROUNDED if stage.symbols else box.ASCII
    stage.console.print(Panel(table, title="proved", title_align="left", expand=False, box=frame))
    shown = shlex.quote(str(stage.checkpoint)) if stage.kept else "YOUR_CHECKPOINT"
    stage.console.print()
    stage.console.print(Text("Next, with a state of yours", style="bold"))
    for line in (*_THREE_LINES, "", f"$ treering inspect {shown}", f"$ treering verify {shown}"):
        stage.console.print(Text(f"   {line}", style="cyan"), soft_wrap=True)
    goes = "" if stage.kept else " and will be removed now; --keep DIR keeps them"
    stage.console.print()
    stage.say(f"The demo's files are in {stage.folder}{goes}.")


def _loss_fell(losses: list[float]) -> Proof:
    before, after = losses[0], _final(losses)
    return Proof(claim="The model learns", held=after < before, detail=f"loss {before:.2f} to {after:.2f}")


def _final(losses: list[float]) -> float:
    last = losses[-_LAST_STEPS:]
    return sum(last) / len(last)


def _complaint(path: Path, leaf: LeafRecord) -> str:
    """Return the message of the error that reading a damaged leaf raises, empty when it raises none."""
    try:
        with open_leaves(path) as leaves:
            leaves.array(leaf)[...]
    except Corrupt as error:
        return f"Corrupt: {error}"
    return ""


def _patience(stage: _Stage, line: str) -> AbstractContextManager[object]:
    """Show that something is under way, where a line can be taken back."""
    if stage.console.is_terminal and stage.symbols:
        return stage.console.status(Text(line, style="dim"))
    return nullcontext()
