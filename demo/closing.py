"""How the demo ends: what each save cost the loop, what was proved, and what to do next."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence

from rich import box
from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from demo.evidence import Proof
from demo.killing import Save
from demo.stage import Stage
from treering._values.human import bytes_text, duration_text

_MOST_ROWS = 8
_NEXT = (
    "import treering as tr",
    'run = tr.Run("run", keep=tr.KeepLast(3), save_every=tr.SaveEvery(steps=100))',
    "step, state = run.load_or_init(init_fn)",
    'run.save(step, state, metrics={"loss": loss})    # in the loop',
)
"""What a newcomer writes."""


def show_saves(stage: Stage, saves: Sequence[Save], nbytes: int) -> None:
    """Show how long the loop stood still for each save, and when each was safe."""
    table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="")
    for title in ("step", "the loop stood still", "safe on the disk after"):
        table.add_column(title, justify="right")
    edge = _MOST_ROWS // 2
    shown = saves if len(saves) <= _MOST_ROWS else [*saves[:edge], *saves[-edge:]]
    for place, save in enumerate(shown):
        if len(shown) < len(saves) and place == edge:
            table.add_row("...", "", "")
        safe = "killed" if save.safe_after is None else duration_text(save.safe_after)
        table.add_row(str(save.step), duration_text(save.stood_still), safe)
    stood = [save.stood_still for save in saves]
    safe_after = [save.safe_after for save in saves if save.safe_after is not None]
    _framed(stage, table, f"saves of {bytes_text(nbytes)}")
    if stood and safe_after:
        stage.say(
            f"The loop stood still {duration_text(statistics.median(stood))} for a save (median), "
            f"{duration_text(sum(stood))} for all {len(stood)}; "
            f"one was safe after {duration_text(statistics.median(safe_after))} (median)."
        )
    if len(stood) > 1 and stood[0] > 2 * statistics.median(stood[1:]):
        stage.say(
            f"The first save took {duration_text(stood[0])}: it imports what saving needs, plans the tree, and tries "
            "once whether jax leaves donated arrays alone. Later saves use that again."
        )


def close(stage: Stage, proofs: Sequence[Proof]) -> None:
    """Show what was proved, and what to do next."""
    show_proofs(stage, proofs)
    shown = shlex.quote(str(stage.run)) if stage.kept else "YOUR_RUN"
    stage.console.print()
    stage.console.print(Text("Next, with a state of yours", style="bold"))
    for line in (*_NEXT, "", f"$ treering log {shown}", f"$ treering verify {shown}"):
        stage.console.print(Text(f"   {line}", style="cyan"), soft_wrap=True)
    goes = "" if stage.kept else " and will be removed now; --keep DIR keeps them"
    stage.console.print()
    stage.say(f"The demo's files are in {stage.folder}{goes}.")


def show_proofs(stage: Stage, proofs: Sequence[Proof]) -> None:
    """Show what was proved."""
    table = Table.grid(padding=(0, 2))
    yes, no = ("✓", "✗") if stage.symbols else ("ok", "NO")
    for proof in proofs:
        mark = Text(yes, style="bold green") if proof.held else Text(no, style="bold red")
        table.add_row(mark, Text(proof.claim), Text(proof.detail, style="dim"))
    _framed(stage, table, "proved")


def _framed(stage: Stage, inner: RenderableType, title: str) -> None:
    frame = box.ROUNDED if stage.symbols else box.ASCII
    stage.console.print()
    stage.console.print(Panel(inner, title=title, title_align="left", expand=False, box=frame))
