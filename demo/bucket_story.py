"""The demo of buckets as it is told: train and save to s3://, kill it, move it, lose the answer to a commit."""

from __future__ import annotations

import http
import re
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from demo.children import Child, Failed
from demo.closing import show_proofs
from demo.evidence import Proof, compared
from demo.killing import Trained, loss_fell, train_until_killed
from demo.moving import listen
from demo.stage import Stage
from torture.fault_proxy import Fault, FaultProxy, Rule, Seen
from treering._cli.main import can_show
from treering._inspect.verify import verify
from treering._runs.steps import steps_of
from treering._store.resolve import located
from treering._values.checkpoint_names import INDEX, step_name
from treering._values.human import duration_text, pluralize

_MESH = "2x2"
_LOOK_EVERY_S = 0.0005
_SETTLES_S = 0.1
_PATIENCE_S = 60.0


def tell(console: Console, url: str, proxy: FaultProxy, *, seconds: float, ports: tuple[int, int]) -> list[Proof]:
    """Run the whole demo with a run at a URL; returns every proof, held or not."""
    stage = Stage(console=console, folder=Path(), kept=False, symbols=can_show("✓━├…µ", sys.stdout))
    title = Text("treering demo", style="bold cyan")
    stage.console.print(title.append("  a training run in a bucket: kill it, move it, lose an answer"))
    stage.say(f"SeaweedFS listens on port {ports[0]} of this machine; a proxy on port {ports[1]} sees each request.")
    stage.say(f'run = tr.Run("{url}", keep=tr.KeepLast(3) | tr.KeepBest("loss"))')
    proofs: list[Proof] = []
    try:
        trained = _train_and_kill(stage, url, proxy, seconds)
        proofs += [loss_fell(trained.losses), _kill_did_no_harm(stage, url, trained)]
        proofs += _move(stage, url, trained)
        proofs += _lose_an_answer(stage, url, proxy)
    except Failed as failure:
        stage.quote(str(failure), "red")
        proofs.append(Proof(claim="Every process does its part", held=False, detail=str(failure)))
    show_proofs(stage, proofs)
    return proofs


def _train_and_kill(stage: Stage, url: str, proxy: FaultProxy, seconds: float) -> Trained:
    stage.chapter(1, "Train a small transformer on eight devices, and save to a bucket behind the loop")

    def kill(child: Child, step: int) -> int | None:
        return _killed_in_the_midst(proxy, child, step)

    trained = train_until_killed(stage, url, seconds, kill)
    saves = [save.safe_after for save in trained.saves.values() if save.safe_after is not None]
    stage.say(
        f"{pluralize(len(saves), 'saves')} were acknowledged, the last of them of step {trained.acknowledged}, "
        f"{duration_text(max(saves))} after it was begun at most"
    )
    stage.chapter(2, "Kill it: SIGKILL in the midst of a save")
    stage.say(
        f"Process {trained.process} was saving step {trained.killed}; {pluralize(trained.written, 'parts')} of its "
        "data were in the bucket, its index was not. In the bucket now:"
    )
    return trained


def _killed_in_the_midst(proxy: FaultProxy, child: Child, step: int) -> int | None:
    """Kill a process while it uploads the data of a step.

    Returns:
        How many parts were there; None where the save was quicker, and the process goes on, or has ended by itself.

    Raises:
        Failed: nothing was uploaded.
    """
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        if _has_begun_to_commit(proxy, step) or child.has_ended:
            return None
        if _parts(proxy, step):
            # Held still, it sends no commit; one that it has sent is seen a moment later.
            child.hold_still()
            time.sleep(_SETTLES_S)
            if _has_begun_to_commit(proxy, step):
                child.go_on()
                return None
            child.kill()
            return _parts(proxy, step)
        time.sleep(_LOOK_EVERY_S)
    raise Failed(f"nothing was uploaded of {step_name(step)}")


def _about(proxy: FaultProxy, step: int) -> list[Seen]:
    return [seen for seen in list(proxy.seen) if f"/{step_name(step)}/" in seen.target]


def _parts(proxy: FaultProxy, step: int) -> int:
    return sum("partNumber=" in seen.target and seen.status == http.HTTPStatus.OK for seen in _about(proxy, step))


def _has_begun_to_commit(proxy: FaultProxy, step: int) -> bool:
    """Whether the key was put a second time: the first time puts the placeholder there."""
    puts = [seen for seen in _about(proxy, step) if seen.method == "PUT" and seen.target.endswith(f"/{INDEX}")]
    return len(puts) > 1


def _kill_did_no_harm(stage: Stage, url: str, trained: Trained) -> Proof:
    """Prove that every step that is there is whole, and that the last one is the last that was acknowledged."""
    _verb(stage, "doctor", url)
    found, latest = verify(url), max(steps_of(located(url)), default=None)
    stage.command(f"verify {url}", ())
    stage.quote(str(found), "green" if found else "red")
    held = found.ok and latest is not None and latest == trained.acknowledged
    whole = f"step {trained.acknowledged}, the last that was acknowledged, is the latest, and all are whole"
    return Proof(
        claim="A kill in the midst of a save harms nothing",
        held=held,
        detail=whole if held else f"the latest step is {latest}; {found}",
    )


def _move(stage: Stage, url: str, trained: Trained) -> list[Proof]:
    stage.chapter(3, f"Move it: resume from the bucket in a fresh process, on a {_MESH} mesh")
    here, last, killed = trained.seen, trained.acknowledged, trained.killed
    if here is None or last is None or killed is None:
        raise Failed("no save was acknowledged before the kill")
    stage.say(f'run = tr.Run("{url}"); run.load(like=like, shardings=rules, mesh=mesh)')
    wait = "a new Python starts, loads and compiles ..."
    with stage.patience(wait), Child("demo.resume", url, _MESH, "latest", str(killed - last)) as child:
        resumed = listen(child)
    if resumed.seen is None or resumed.saved != killed:
        raise Failed("the process that resumed did not get to its end")
    stage.say(
        f"process {resumed.seen.process} loaded step {resumed.seen.step} in {duration_text(resumed.seconds)}, checked, "
        f"from {here.mesh} onto {resumed.seen.mesh}"
    )
    stage.say(f"  its next loss  {resumed.seen.next_loss}   ours  {here.next_loss}")
    stage.say(f"it took {pluralize(len(resumed.losses), 'more steps')} and saved step {killed} again")
    return compared(here, resumed.seen)


def _lose_an_answer(stage: Stage, url: str, proxy: FaultProxy) -> list[Proof]:
    stage.chapter(4, "Lose an answer: the bucket commits a save, and cannot say so")
    before = max(steps_of(located(url)))
    step = before + 1
    # The first put of the key is the placeholder, the second one the commit.
    rule = Rule(Fault.DROP_ANSWER, "PUT", rf"/{step_name(step)}/{re.escape(INDEX)}$", conditional=True, first=2)
    proxy.strike(rule)
    told = ""
    with stage.patience("a new Python starts, trains one more step and saves it ..."):
        try:
            with Child("demo.resume", url, "1x1", "latest", "1") as child:
                saved = listen(child).saved
        except Failed as failure:
            saved, told = None, str(failure)
    requests = _about(proxy, step)
    proxy.heal()
    struck = next((at for at, seen in enumerate(requests) if seen.fault is not None), None)
    if struck is None:
        raise Failed(f"no answer of a commit was lost; {told}")
    stage.say(f"What the proxy saw of step {step}, from the commit on:")
    for seen in requests[struck : struck + 3]:
        stage.say(f"  {_in_words(seen)}")
    stage.say(
        f"The save returned: step {saved} is committed. It had read the index back and found its own attempt in it."
        if saved == step
        else f"The save did not return: {told}"
    )
    found, latest = verify(url), max(steps_of(located(url)), default=None)
    _verb(stage, "log", url)
    return [
        Proof(
            claim="A lost answer at the commit is no lost save",
            held=saved == step == latest,
            detail=f"the save of step {saved} was acknowledged, and step {latest} is the latest",
        ),
        Proof(claim="Every step in the bucket is whole", held=found.ok, detail=str(found).replace(url, "the run")),
    ]


def _in_words(seen: Seen) -> str:
    """Say what was asked, and what came of it."""
    name = seen.target.partition("?")[0].rpartition("/")[2]
    condition = " if nothing else was put meanwhile" if seen.conditional and seen.method == "PUT" else ""
    answer = "done, and its answer is lost" if seen.fault is not None else f"answer {seen.status}"
    return f"{seen.method:<6} {name}{condition}: {answer}"


def _verb(stage: Stage, verb: str, url: str) -> None:
    """Show what a verb of the command line says of the run."""
    command = [sys.executable, "-m", "treering", verb, url]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)  # noqa: S603
    stage.command(f"{verb} {url}", [*done.stdout.splitlines(), *done.stderr.splitlines()])
