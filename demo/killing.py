"""The demo's first chapters: a run trains and saves behind its loop, and is killed in the midst of a save."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from demo.children import Child, Failed
from demo.display import TrainingDisplay, curve
from demo.evidence import Evidence, Proof
from demo.stage import Stage, short
from treering._checkpoint.forms import list_headers
from treering._inspect.verify import verify
from treering._runs.steps import steps_of
from treering._values.checkpoint_names import INDEX, step_name
from treering._values.human import bytes_text, count_text, pluralize
from treering._view.rows import lay_out
from treering._view.tree_text import tree_lines

_SHOWN = ("state/params", "state/step", "windows")
"""Branches of a step that the story shows."""
_LAST_STEPS = 5
"""Steps at the end whose mean loss counts: single steps are noisy."""
_LEAST_WRITTEN = 1 << 20
"""Bytes of a save that are there when it is killed."""
_LOOK_EVERY_S = 0.0005
_PATIENCE_S = 60.0


@dataclasses.dataclass(slots=True, kw_only=True)
class Save:
    """One save, as the loop saw it."""

    step: int
    """Which step."""
    stood_still: float
    """Seconds that the loop stood still for it."""
    safe_after: float | None = None
    """Seconds from the call until it was safe on the disk; None as long as it is not."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Trained:
    """What is known of a training run that was killed."""

    losses: list[float] = dataclasses.field(default_factory=list)
    """Of every step that was told of."""
    saves: dict[int, Save] = dataclasses.field(default_factory=dict)
    """The saves that were begun, by step."""
    states: dict[int, Evidence] = dataclasses.field(default_factory=dict)
    """The states of some saves, by step."""
    process: int = 0
    """The process that trained."""
    killed: int | None = None
    """The step whose save was killed."""
    written: int = 0
    """Bytes of it that were there."""

    @property
    def acknowledged(self) -> int | None:
        """The last step that was told to be safe."""
        return max((step for step, save in self.saves.items() if save.safe_after is not None), default=None)

    @property
    def seen(self) -> Evidence | None:
        """The state of that step, if it was looked at."""
        return None if self.acknowledged is None else self.states.get(self.acknowledged)


def train_and_kill(stage: Stage, seconds: float) -> Trained:
    """Train for some seconds, then kill the process in the midst of a save.

    Raises:
        Failed: it did not get there.
    """
    stage.chapter(1, "Train a small transformer on eight devices, and save behind the loop")
    stage.say("The loop hands each state to a thread that writes it, and goes on at once.")

    def kill(child: Child, step: int) -> int | None:
        return killed_in_the_midst(child, stage.run / step_name(step))

    trained = train_until_killed(stage, os.fspath(stage.run), seconds, kill)
    _show(stage, trained, trained.killed or 0)
    return trained


def train_until_killed(stage: Stage, place: str, seconds: float, kill: Callable[[Child, int], int | None]) -> Trained:
    """Train for some seconds with a run at a path or URL, then let ``kill`` end the process in the midst of a save.

    ``kill`` is given the process and the step, and returns what was written of it; None where the save was quicker.

    Raises:
        Failed: it did not get there.
    """
    trained = Trained()
    with (
        Child("demo.train", place, str(seconds)) as child,
        TrainingDisplay(stage.console, seconds, blocks=stage.symbols) as display,
    ):
        trained.process = child.number
        for event in child.events():
            _take_in(stage, trained, display, event)
            # Only after a save whose state is known was acknowledged there is something to come back to.
            if event["event"] == "saving" and trained.seen is not None:
                written = kill(child, event["step"])
                if written is not None:
                    trained.killed, trained.written = event["step"], written
                    break
        for event in child.last_words() if trained.killed is not None else ():
            _take_in(stage, trained, display, event)
    if trained.killed is None:
        raise Failed("the training process ended before it was killed")
    losses, drawn = trained.losses, f"   {curve(trained.losses)}" if stage.symbols else ""
    stage.say(
        f"{pluralize(len(losses), 'steps')}: loss {losses[0]:.2f} to {_final(losses):.2f} nats a character{drawn}"
    )
    return trained


def _take_in(stage: Stage, trained: Trained, display: TrainingDisplay, event: dict[str, Any]) -> None:
    """Take in what the training process tells."""
    match event["event"]:
        case "ready":
            stage.say(
                f"The model has {count_text(event['parameters'])} parameters, sharded with Adam's state over a mesh of "
                f"4 x 2 devices of this CPU. It reads {count_text(event['characters'])} characters of Python's help."
            )
        case "step":
            if not trained.losses:
                display.compiled()
            trained.losses.append(event["loss"])
            display.show(event["loss"])
        case "saving":
            trained.states[event["step"]] = Evidence(**event["evidence"])
        case "begun":
            trained.saves[event["step"]] = Save(step=event["step"], stood_still=event["seconds"])
        case "saved":
            trained.saves[event["step"]].safe_after = event["seconds"]
        case "failed":
            raise Failed(event["problem"])


def killed_in_the_midst(child: Child, step: Path) -> int | None:
    """Kill a process while it writes a step, when bytes of it are there and its index is not.

    Returns:
        How many bytes were there; None where the save was quicker, and the process goes on, or has ended by itself.

    Raises:
        Failed: nothing was written.
    """
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        if (step / INDEX).exists() or child.has_ended:
            return None
        if _written(step) >= _LEAST_WRITTEN:
            # Held still, it cannot get to its commit between the look and the kill.
            child.hold_still()
            if (step / INDEX).exists():
                child.go_on()
                return None
            child.kill()
            if (step / INDEX).exists():
                raise Failed(f"the save of {step.name} was quicker than the kill")
            return _written(step)
        time.sleep(_LOOK_EVERY_S)
    raise Failed(f"nothing was written to {step.name}")


def _written(step: Path) -> int:
    try:
        return sum(path.stat().st_size for path in step.iterdir())
    except FileNotFoundError:
        # Not made yet; or a file of it went away, and the next look says more.
        return 0


def _show(stage: Stage, trained: Trained, killed: int) -> None:
    stage.chapter(2, "Kill it: SIGKILL in the midst of a save")
    stage.say("A save is whole or not there: a kill in the midst of one leaves the steps before it as they were.")
    stage.code('run.save(step, {"state": state, "windows": windows}, metrics={"loss": loss})')
    last = stage.run / step_name(trained.acknowledged or 0)
    listing = list_headers(last)
    size = listing.file_bytes
    begun = pluralize(len(trained.saves), "saves")
    stage.say(f"{begun} of {bytes_text(size)} were begun; {last.name} is the last that had said it was safe.")
    layout = lay_out(listing.root, globs=_SHOWN, depth=3)
    shown = tree_lines(layout, title=f"run/{last.name}", file_bytes=size, style=stage.style)
    stage.command(f"inspect run {' '.join(_SHOWN)} --depth 3", shown)
    stage.console.print()
    stage.say(
        f"Process {trained.process} was saving {step_name(killed)}, {bytes_text(trained.written)} of it were written "
        f"when SIGKILL ended it. Without its index, treering.json, what is in that folder is no step; the next save "
        f"there removes it:"
    )
    for path in sorted((stage.run / step_name(killed)).iterdir()):
        stage.say(f"  {bytes_text(path.stat().st_size):>8}  {short(path.name)}")


def kill_did_no_harm(stage: Stage, trained: Trained) -> Proof:
    """Prove that every step that is there is whole, and that the last one is the last that was acknowledged."""
    found = verify(stage.run)
    latest = max(steps_of(stage.run), default=None)
    stage.command("verify run", ())
    stage.quote(str(found).replace(os.fspath(stage.run), stage.run.name), "green" if found else "red")
    whole = f"step {trained.acknowledged}, the last that was acknowledged, is the latest, and all are whole"
    return Proof(
        claim="A kill in the midst of a save harms nothing",
        held=found.ok and latest is not None and latest == trained.acknowledged,
        detail=whole if found and latest == trained.acknowledged else f"the latest step is {latest}; {found}",
    )


def loss_fell(losses: Sequence[float]) -> Proof:
    """Prove that the model learned."""
    before, after = losses[0], _final(losses)
    return Proof(claim="The model learns", held=after < before, detail=f"loss {before:.2f} to {after:.2f}")


def _final(losses: Sequence[float]) -> float:
    """Return the mean of the last losses."""
    last = losses[-_LAST_STEPS:]
    return sum(last) / len(last)
