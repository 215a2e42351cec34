"""The demo's third chapter: fresh processes resume the run on other meshes, to the last bit."""

from __future__ import annotations

import dataclasses
import os
import time
from contextlib import ExitStack

from demo.children import Child, Failed
from demo.evidence import Evidence, Proof, compared
from demo.killing import Trained
from demo.stage import Stage
from treering._checkpoint.forms import list_headers
from treering._runs.reports import list_run
from treering._values.checkpoint_names import step_name
from treering._values.human import bytes_text, duration_text, pluralize, rate_text
from treering._view.run_text import log_lines

_MESHES = ("2x2", "1x1")


@dataclasses.dataclass(slots=True)
class Resumed:
    """What a fresh process told."""

    seen: Evidence | None = None
    """The state that it loaded."""
    seconds: float = 0.0
    """How long that took."""
    losses: list[float] = dataclasses.field(default_factory=list)
    """Of the steps that it took."""
    saved: int | None = None
    """The step that it saved."""


def move(stage: Stage, trained: Trained) -> list[Proof]:
    """Resume on four devices, and train on to the step whose save was killed; resume on one.

    Raises:
        Failed: a process did not get to its end.
    """
    stage.chapter(3, "Move it: resume in fresh processes, on a 2x2 mesh and on one device")
    stage.say("What eight devices saved loads onto four and onto one, and training goes on as if nothing had happened.")
    here, last, killed = trained.seen, trained.acknowledged, trained.killed
    if here is None or last is None or killed is None:
        raise Failed("no save was acknowledged before the kill")
    # The first takes what is latest and saves over what the kill left; the second names its step.
    wishes = ((_MESHES[0], "latest", killed - last), (_MESHES[1], str(last), 0))
    with stage.patience("new Pythons start, load and compile ..."), ExitStack() as running:
        module = "demo.resume"
        children = [
            running.enter_context(Child(module, os.fspath(stage.run), mesh, which, str(steps)))
            for mesh, which, steps in wishes
        ]
        four, one = [listen(child) for child in children]
    if four.seen is None or one.seen is None or four.saved != killed:
        raise Failed("the processes that resumed did not get to their ends")
    size = list_headers(stage.run / step_name(last)).file_bytes
    stage.code("run.load(like=like, shardings=rules, mesh=mesh)")
    for resumed in (four, one):
        _show(stage, here, resumed, size)
    steps = " ".join(f"{loss:.3f}" for loss in four.losses)
    stage.say(
        f"The one on {_MESHES[0]} took {pluralize(len(four.losses), 'more steps')}, with the losses {steps}, and saved "
        f"{step_name(killed)}, where the kill had struck."
    )
    stage.command("log run", log_lines(list_run(stage.run, shown="run"), now=time.time(), style=stage.style))
    proofs = [proof for resumed in (four, one) if resumed.seen for proof in compared(here, resumed.seen)]
    return [*proofs, nothing_left(stage, killed)]


def listen(child: Child) -> Resumed:
    """Take in what a process tells that resumes, until it ends.

    Raises:
        Failed: it ended with an error.
    """
    told = Resumed()
    for event in child.events():
        match event["event"]:
            case "loaded":
                told.seen, told.seconds = Evidence(**event["evidence"]), event["seconds"]
            case "step":
                told.losses.append(event["loss"])
            case "saved":
                told.saved = event["step"]
    return told


def _show(stage: Stage, here: Evidence, there: Resumed, size: int) -> None:
    seen = there.seen
    if seen is None:
        return
    stage.say(
        f"Process {seen.process} loaded step {seen.step} from {here.mesh} onto {seen.mesh}: {bytes_text(size)} in "
        f"{duration_text(there.seconds)}, {rate_text(size, there.seconds)}, every byte checked."
    )
    stage.say(f"  its next loss  {seen.next_loss}   before the kill  {here.next_loss}   (in hexadecimal: every bit)")


def nothing_left(stage: Stage, step: int) -> Proof:
    """Prove that the save after the kill swept away what the killed one had left."""
    folder = stage.run / step_name(step)
    named = {file.name for file in list_headers(folder).files}
    left = sorted({path.name for path in folder.iterdir()} - named)
    return Proof(
        claim="The next save sweeps up",
        held=not left,
        detail=f"{left[0]} is still there"
        if left
        else f"{pluralize(len(named), 'files')} in {folder.name}, each of them needed",
    )
