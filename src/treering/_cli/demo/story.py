"""The demo as it is told: train, save, load in a fresh process, damage, and the table of what was proved."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeVar

import jax
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from treering import serialization
from treering._cli.demo import FILES, model, prove, text
from treering._cli.demo.display import TrainingDisplay, curve
from treering._cli.demo.prove import Evidence, Proof
from treering._cli.terminal import can_show, look_of
from treering._ops.inspect import listing_of
from treering._values.human import bytes_text, count_text, duration_text, rate_text
from treering._values.keys import Glob
from treering._view.rows import lay_out
from treering._view.tree_text import tree_lines
from treering.errors import Corrupt

__all__ = ["tell"]

_SHOWN = ("params", "adam", "key", "step")
"""Branches of the file that the story shows."""
_THREE_LINES = (
    "from treering import serialization",
    'serialization.save_to_file(state, "state.msgpack")',
    'state = serialization.load_from_file(state, "state.msgpack", strict=True)',
)
"""What a newcomer writes."""

Made = TypeVar("Made")

_LAST_STEPS = 5
"""Steps at the end whose mean loss counts: single steps are noisy."""
_FEWEST_STEPS = 10
"""Steps taken even where the time is up before: enough for the loss to fall."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """Where the story is told and where its files go."""

    console: Console
    folder: Path
    kept: bool
    symbols: bool
    """Whether the output can show box drawing and check marks."""

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
    stage.console.print(Text("treering demo", style="bold cyan").append("  a training run, saved and proved", style=""))
    corpus, state, losses = _train(stage, seconds)
    file, here = _save(stage, state, corpus)
    proofs = [_loss_fell(losses)]
    proofs += _load_elsewhere(stage, file, here)
    proofs += _damage(stage, file, state, here)
    _close(stage, proofs, file)
    return proofs


def _train(stage: _Stage, seconds: float) -> tuple[text.Corpus, model.TrainState, list[float]]:
    stage.chapter(1, "Train a character-level transformer on Python's own help texts")
    config = model.Config(alphabet_size=0)
    corpus = text.load_corpus(context=config.context, seed=config.seed)
    state = model.start(config._replace(alphabet_size=len(corpus.alphabet)))
    device = jax.devices()[0]
    stage.say(
        f"{count_text(model.count_parameters(state.params))} parameters, Adam, "
        f"{count_text(len(corpus.tokens))} characters, on {device.device_kind} ({device.platform})"
    )
    losses: list[float] = []
    with TrainingDisplay(stage.console, seconds, blocks=stage.symbols) as display:
        ends = float("inf")
        while len(losses) < _FEWEST_STEPS or time.perf_counter() < ends:
            state, loss = model.train_step(state, text.batch_at(corpus, state.position, config.batch))
            losses.append(float(loss))
            if len(losses) == 1:
                ends = time.perf_counter() + seconds
                display.compiled()
            display.show(losses[-1])
    drawn = f"   {curve(losses)}" if stage.symbols else ""
    stage.say(f"{len(losses)} steps: loss {losses[0]:.2f} to {_final(losses):.2f} nats a character{drawn}")
    return corpus, state, losses


def _save(stage: _Stage, state: model.TrainState, corpus: text.Corpus) -> tuple[Path, Evidence]:
    stage.chapter(2, "Save the whole state: weights, Adam, PRNG key, position, settings")
    file = stage.folder / FILES[0]
    _, seconds = _timed(lambda: serialization.save_to_file(state, file))
    size = file.stat().st_size
    stage.say(f'serialization.save_to_file(state, "{file.name}")')
    stage.say(f"{bytes_text(size)} in {duration_text(seconds)}, {rate_text(size, seconds)}, safe on the disk")
    key, largest = prove.largest_leaf(state)
    stage.say(f"{len(jax.tree.leaves(state))} leaves, the largest is {key} with {bytes_text(largest)}")
    listing = listing_of(file)
    look = dataclasses.replace(look_of(sys.stdout), width=stage.console.width - 3)
    layout = lay_out(listing.root, globs=[Glob.parse(glob) for glob in _SHOWN], depth=2)
    stage.console.print()
    stage.say(f"$ treering inspect {file.name} {' '.join(_SHOWN)} --depth 2")
    for line in tree_lines(layout, title=file.name, file_bytes=listing.file_bytes, look=look):
        stage.console.print(Text.from_ansi(f"   {line}"), soft_wrap=True)
    return file, prove.evidence_of(state, corpus)


def _load_elsewhere(stage: _Stage, file: Path, here: Evidence) -> list[Proof]:
    stage.chapter(3, "Load it in a fresh process and take the next step there")
    with _patience(stage, "a new Python starts, compiles and loads ..."):
        there = prove.from_fresh_process(file)
    if isinstance(there, str):
        stage.quote(there, "red")
        return [
            Proof(claim="A fresh process loads every bit", held=False, detail=there),
            Proof(claim="Training goes on unchanged", held=False, detail="no process to compare"),
        ]
    size = file.stat().st_size
    stage.say("serialization.load_from_file(template, file, strict=True, to_jax=True)")
    stage.say(
        f"process {there.process} loaded {bytes_text(size)} in {duration_text(there.load_seconds)}, "
        f"{rate_text(size, there.load_seconds)}"
    )
    stage.say(f"its next loss  {there.next_loss}")
    stage.say(f"ours           {here.next_loss}")
    unequal = [key for key in {**here.leaves, **there.leaves} if here.leaves.get(key) != there.leaves.get(key)]
    equal = f"{len(here.leaves)} of {len(here.leaves)} leaves, compared by SHA-256"
    same_loss = there.next_loss == here.next_loss
    return [
        Proof(
            claim="A fresh process loads every bit",
            held=not unequal,
            detail=f"{len(unequal)} leaves differ, the first is {unequal[0]}" if unequal else equal,
        ),
        Proof(
            claim="Training goes on unchanged",
            held=same_loss,
            detail=f"loss {float.fromhex(here.next_loss):.6f}, "
            + ("equal to the last bit" if same_loss else f"there {float.fromhex(there.next_loss):.6f}"),
        ),
    ]


def _damage(stage: _Stage, file: Path, state: model.TrainState, here: Evidence) -> list[Proof]:
    stage.chapter(4, "Damage it, and be told")
    squeezed = stage.folder / FILES[1]
    with _patience(stage, "gzip at work ..."):
        data, seconds = _timed(lambda: serialization.to_compressed_bytes(state))
        squeezed.write_bytes(data)
        back = serialization.from_compressed_bytes(state, data, strict=True)
    equal = prove.fingerprints(back) == here.leaves
    stage.say(f"the gzip form: {bytes_text(len(data))} after {duration_text(seconds)}")
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    stage.say("one bit of it flipped, then loaded:")
    about_bit = _complaint(lambda: serialization.from_compressed_bytes(state, bytes(flipped)))
    stage.quote(about_bit or "no complaint", "yellow")
    short = stage.folder / "cut-short.msgpack"
    short.write_bytes(file.read_bytes()[:-1000])
    stage.say("the plain form without its last 1000 bytes, then loaded:")
    about_end = _complaint(lambda: serialization.load_from_file(state, short))
    stage.quote(about_end or "no complaint", "yellow")
    short.unlink()
    return [
        Proof(
            claim="The gzip form holds the same bits",
            held=equal,
            detail=f"{bytes_text(len(data))}, {len(here.leaves)} leaves",
        ),
        _noticed("A flipped bit is noticed", about_bit, "Corrupt, by gzip's own checks"),
        _noticed("A file cut short is noticed", about_end, "Corrupt, with the leaf's name"),
    ]


def _close(stage: _Stage, proofs: list[Proof], file: Path) -> None:
    table = Table.grid(padding=(0, 2))
    yes, no = ("✓", "✗") if stage.symbols else ("ok", "NO")
    for proof in proofs:
        mark = Text(yes, style="bold green") if proof.held else Text(no, style="bold red")
        table.add_row(mark, Text(proof.claim), Text(proof.detail, style="dim"))
    stage.console.print()
    frame = box.ROUNDED if stage.symbols else box.ASCII
    stage.console.print(Panel(table, title="proved", title_align="left", expand=False, box=frame))
    shown = shlex.quote(str(file)) if stage.kept else "YOUR.msgpack"
    stage.console.print()
    stage.console.print(Text("Next, on a file of yours", style="bold"))
    for line in (f"$ treering inspect {shown}", "", *_THREE_LINES):
        stage.console.print(Text(f"   {line}", style="cyan"), soft_wrap=True)
    goes = "" if stage.kept else " and will be removed now; --keep DIR keeps them"
    stage.console.print()
    stage.say(f"The demo's files are in {stage.folder}{goes}.")


def _loss_fell(losses: list[float]) -> Proof:
    before, after = losses[0], _final(losses)
    return Proof(claim="The model learns", held=after < before, detail=f"loss {before:.2f} to {after:.2f}")


def _noticed(claim: str, complaint: str, detail: str) -> Proof:
    return Proof(claim=claim, held=bool(complaint), detail=detail if complaint else "the load raised nothing")


def _final(losses: list[float]) -> float:
    last = losses[-_LAST_STEPS:]
    return sum(last) / len(last)


def _complaint(load: Callable[[], object]) -> str:
    """Return the message of the error that a load of damaged bytes raises, empty when it raises none."""
    try:
        load()
    except Corrupt as error:
        return f"Corrupt: {error}"
    return ""


def _patience(stage: _Stage, line: str) -> AbstractContextManager[object]:
    """Show that something is under way, where a line can be taken back."""
    if stage.console.is_terminal and stage.symbols:
        return stage.console.status(Text(line, style="dim"))
    return nullcontext()


def _timed(work: Callable[[], Made]) -> tuple[Made, float]:
    began = time.perf_counter()
    made = work()
    return made, time.perf_counter() - began
