"""The demo as it is told: train and save, kill it, move it, break it, and the tables of what that cost and proved.

The arrays live in processes of their own; this one only tells, looks into files, and imports no jax.
"""

from __future__ import annotations

import os
import sys
import tempfile
import webbrowser
from pathlib import Path

from rich.console import Console
from rich.text import Text

from demo import FILES
from demo.breaking import break_it
from demo.children import Failed
from demo.closing import close, show_saves
from demo.evidence import Proof
from demo.killing import Trained, kill_did_no_harm, loss_fell, train_and_kill
from demo.moving import move
from demo.stage import Stage
from treering._checkpoint.forms import list_headers
from treering._cli.main import can_show
from treering._report.contents import gather
from treering._report.page import render

_BEGINNING = (
    "A small language model trains here for {seconds:g} s, and saves as it goes. Then its process is killed while it "
    "saves, new processes go on from the last save that was safe, on fewer devices, and one bit of a file is flipped. "
    "After each of these the demo compares every bit with what it should be. Nothing leaves this machine."
)
"""What a newcomer is told first."""


def tell(console: Console, *, seconds: float, folder: Path, kept: bool, opens: bool = False) -> list[Proof]:
    """Run the whole demo, with ``seconds`` of training; returns every proof, held or not.

    Its files are left in ``folder``; ``kept`` says whether the caller leaves that folder. ``opens`` opens the report of
    the run in the browser.
    """
    stage = Stage(console=console, folder=folder, kept=kept, symbols=can_show("✓━├…µ", sys.stdout))
    stage.console.print(Text("treering demo", style="bold cyan").append("  a training run: kill it, move it, break it"))
    stage.say(_BEGINNING.format(seconds=seconds))
    proofs: list[Proof] = []
    trained: Trained | None = None
    try:
        trained = train_and_kill(stage, seconds)
        proofs += [loss_fell(trained.losses), kill_did_no_harm(stage, trained)]
        proofs += move(stage, trained)
        proofs += break_it(stage)
    except Failed as failure:
        stage.quote(str(failure), "red")
        proofs.append(Proof(claim="Every process does its part", held=False, detail=str(failure)))
    if trained is not None:
        stage.chapter(5, "What it cost: how long the loop stood still for each save")
        show_saves(stage, list(trained.saves.values()), list_headers(stage.run).file_bytes)
    close(stage, proofs)
    if trained is not None:
        _report(stage, opens=opens)
    return proofs


def _report(stage: Stage, *, opens: bool) -> None:
    """Write a page about the run, which stays, and say where it is."""
    page = render(gather(os.fspath(stage.run)))
    path = stage.folder / FILES[1]
    if not stage.kept:  # the folder goes
        number, name = tempfile.mkstemp(prefix="treering-demo-", suffix=".html")
        os.close(number)
        path = Path(name)
    path.write_bytes(page)
    stage.say(f"A report of the run, with its steps, its losses and a map of its bytes, is in {path}.")
    if opens:
        webbrowser.open(path.as_uri())
