"""The demo: its parts, and the whole of it in short."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

import treering as package
from demo import FILES, breaking, closing, digests, killing, meshes, model, moving, story, text
from demo.children import Child, Failed
from demo.display import TrainingDisplay, curve
from demo.evidence import Evidence, compared
from demo.killing import Save, Trained
from demo.stage import Stage
from tests import faults
from tests.cli.runs import add_step
from tests.command import here, treering

TINY = model.Config(alphabet_size=16, context=8, width=16, blocks=1, heads=2, batch=2, dropout=0.5)


@pytest.fixture(scope="module")
def corpus() -> text.Corpus:
    return text.load_corpus(context=8, seed=0)


def tiny(corpus: text.Corpus) -> model.TrainState:
    return meshes.placed(model.start(TINY._replace(alphabet_size=len(corpus.alphabet))), meshes.mesh_of(1, 1))


def test_batches_are_fixed_by_their_position(corpus: text.Corpus) -> None:
    again = text.load_corpus(context=8, seed=0)
    assert np.array_equal(text.batch_at(corpus, 40, 4), text.batch_at(again, 40, 4))
    assert not np.array_equal(text.batch_at(corpus, 40, 4), text.batch_at(corpus, 41, 4))
    windows = len(corpus.starts)
    assert np.array_equal(text.batch_at(corpus, windows, 2), text.batch_at(corpus, 0, 2))
    assert int(corpus.tokens.max()) < len(corpus.alphabet)


def test_windows_go_on_where_others_stood(corpus: text.Corpus) -> None:
    windows = text.Windows(corpus, 2)
    first = [next(windows) for _ in range(3)]
    assert np.array_equal(first[2], text.batch_at(corpus, 4, 2))
    others = text.Windows(corpus, 2)
    others.set_state(windows.get_state())
    assert np.array_equal(others.peek(), text.batch_at(corpus, 6, 2))
    assert np.array_equal(next(others), next(windows))
    assert others.get_state() == windows.get_state() == {"position": 8}


@pytest.mark.slow
def test_training_lowers_the_loss_and_moves_every_part(corpus: text.Corpus) -> None:
    first, state = model.start(TINY._replace(alphabet_size=len(corpus.alphabet))), tiny(corpus)
    step = meshes.stepper(state, meshes.mesh_of(1, 1))
    windows = text.Windows(corpus, 2)
    losses = []
    for _ in range(30):
        state, loss = step(state, next(windows))
        losses.append(float(loss))
    assert np.mean(losses[-5:]) < losses[0] - 0.2
    assert (state.step, windows.get_state()["position"], int(state.adam.count)) == (30, 60, 30)
    changed = jax.tree.map(lambda a, b: bool(np.any(np.asarray(a) != np.asarray(b))), first.params, state.params)
    assert all(jax.tree.leaves(changed))
    assert digests.fingerprints(first.key) != digests.fingerprints(state.key)


def test_every_rule_cuts_something(corpus: text.Corpus) -> None:
    keys = digests.fingerprints(tiny(corpus))
    for pattern, _ in meshes.RULES:
        assert any(re.search(pattern, key) for key in keys)


def test_the_next_loss_depends_on_everything_that_is_saved(corpus: text.Corpus) -> None:
    state, windows = tiny(corpus), text.Windows(corpus, 2)
    here = digests.evidence_of(state, windows, mesh="1x1")
    assert digests.evidence_of(state, windows, mesh="1x1") == here
    assert model.loss_of(state._replace(key=jax.random.key(7)), windows.peek()).hex() != here.next_loss
    windows.set_state({"position": 99})
    there = digests.evidence_of(state, windows, mesh="1x1")
    assert there.next_loss != here.next_loss
    assert {key for key in here.leaves if here.leaves[key] != there.leaves[key]} == {"windows/position"}


def test_fingerprints_see_every_bit() -> None:
    tree: dict[str, Any] = {"w": np.zeros(3, np.float32), "n": 1, "x": 1.0, "key": jax.random.key(0)}
    base = digests.fingerprints(tree)
    for change in (
        {"w": -tree["w"]},
        {"w": tree["w"].astype(np.float16)},
        {"w": tree["w"].reshape(3, 1)},
        {"n": 1.0},
        {"n": True},
        {"x": np.nextafter(1.0, 2.0).item()},
        {"key": jax.random.key(1)},
        {"key": jax.random.key_data(tree["key"])},
    ):
        assert digests.fingerprints(tree | change) != base
    assert digests.fingerprints(jax.tree.map(jax.numpy.asarray, {"w": tree["w"]}))["w"] == base["w"]


def seen(**changes: Any) -> Evidence:
    members: dict[str, Any] = {
        "process": 1,
        "mesh": "4x2",
        "step": 3,
        "leaves": {"a": "int 1", "b": "int 2"},
        "next_loss": (1.0).hex(),
    }
    return Evidence(**members | changes)


def test_a_proof_that_fails_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [proof.held for proof in compared(seen(), seen(process=2, mesh="1x2"))] == [True, True]
    bits, loss = compared(seen(), seen(leaves={"a": "int 1", "b": "int 3"}, next_loss=(1.5).hex()))
    assert not bits.held
    assert "b" in bits.detail
    assert not loss.held
    assert not compared(seen(leaves={}), seen(leaves={}))[0].held
    closing.close(Stage(console=Console(width=100), folder=tmp_path, kept=True, symbols=False), [bits])
    assert "NO" in capsys.readouterr().out


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    for step in (3, 6):
        add_step(tmp_path / FILES[0], step)
    return Stage(console=Console(width=100), folder=tmp_path, kept=True, symbols=False)


def test_what_a_save_leaves_is_found(stage: Stage) -> None:
    assert moving.nothing_left(stage, 6).held
    (stage.run / "step_00000006" / "data-left").write_bytes(b"")
    assert not moving.nothing_left(stage, 6).held


def trained(step: int) -> Trained:
    """A training whose last acknowledged save was that of a step, and a later one was not."""
    saves = [Save(step=step, stood_still=0.1, safe_after=1.0), Save(step=step + 3, stood_still=0.1)]
    return Trained(saves={save.step: save for save in saves})


def test_a_kill_that_did_harm_is_found(stage: Stage) -> None:
    assert killing.kill_did_no_harm(stage, trained(6)).held
    assert not killing.kill_did_no_harm(stage, trained(9)).held
    assert not killing.kill_did_no_harm(stage, trained(3)).held
    next((stage.run / "step_00000003").glob("data-*")).unlink()
    assert not killing.kill_did_no_harm(stage, trained(6)).held


def test_damage_is_undone_and_a_silent_load_is_found(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [proof.held for proof in breaking.break_it(stage)] == [True]
    assert package.verify(stage.run).ok
    faults.answer(monkeypatch, breaking, "complaint_of", "")
    assert [proof.held for proof in breaking.break_it(stage)] == [False]


class Patient:
    """A process that does what its test says when it is held still."""

    def __init__(self, step: Path, *, quick: bool) -> None:
        self.calls: list[str] = []
        self.has_ended = False
        self._step = step
        self._quick = quick

    def hold_still(self) -> None:
        self.calls.append("held still")
        if self._quick:
            (self._step / "treering.json").touch()

    def go_on(self) -> None:
        self.calls.append("goes on")

    def kill(self) -> None:
        self.calls.append("killed")


@pytest.mark.parametrize("quick", [False, True])
def test_only_a_save_that_is_not_committed_is_killed(tmp_path: Path, quick: bool) -> None:
    (tmp_path / "data").write_bytes(bytes(2 << 20))
    child = Patient(tmp_path, quick=quick)
    found = killing.killed_in_the_midst(child, tmp_path)  # type: ignore[arg-type]
    assert found == (None if quick else 2 << 20)
    assert child.calls == ["held still", "goes on" if quick else "killed"]
    # One that is committed, or whose process has ended, is not even held still.
    child = Patient(tmp_path, quick=False)
    child.has_ended = not quick
    assert killing.killed_in_the_midst(child, tmp_path) is None  # type: ignore[arg-type]
    assert child.calls == []


def test_a_process_is_held_still_goes_on_and_is_killed() -> None:
    program = "tests.demo.counting"
    with Child(program) as child:
        events = child.events()
        assert next(events)["event"] == "counted"
        child.hold_still()
        assert not child.has_ended
        child.go_on()
        assert next(events)["event"] == "counted"
        child.kill()
        assert child.has_ended
        assert all(event["event"] == "counted" for event in child.last_words())


def test_the_saves_are_shown_with_what_they_cost(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    stage = Stage(console=Console(width=100), folder=tmp_path, kept=True, symbols=False)
    saves = [Save(step=step, stood_still=0.001 * step, safe_after=0.1 * step) for step in range(1, 21)]
    closing.show_saves(stage, [*saves, Save(step=21, stood_still=0.021)], 2048)
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if " ms " in line and line.startswith("|")]
    assert [row[1] for row in rows] == ["1", "2", "3", "4", "18", "19", "20", "21"]
    assert rows[-1][2:] == ["21.0", "ms", "killed", "|"]
    assert "..." in out
    assert "stood still 11.0 ms for a save (median), 231 ms for all 21; one was safe after 1.05 s (median)." in out
    assert "The first save" not in out
    closing.show_saves(stage, [Save(step=1, stood_still=0.09, safe_after=0.1), *saves[1:4]], 2048)
    assert "The first save took 90.0 ms: it imports what saving needs" in capsys.readouterr().out


@pytest.mark.parametrize("width", [40, 72, 100])
def test_prose_is_wrapped_on_a_terminal_and_whole_elsewhere(width: int, tmp_path: Path) -> None:
    saves = [Save(step=step, stood_still=0.5 if step == 1 else 0.001, safe_after=0.1) for step in range(1, 4)]
    prose = {}
    for terminal in (True, False):
        console = Console(force_terminal=terminal, width=width, color_system=None)
        stage = Stage(console=console, folder=tmp_path, kept=True, symbols=False)
        with console.capture() as captured:
            closing.show_saves(stage, saves, 2048)
            stage.say(" ".join(["word"] * 50))
        prose[terminal] = [line for line in captured.get().splitlines() if not line.startswith(("+", "|"))]
    assert max(map(len, prose[True])) <= width
    assert all(line.startswith("   ") for line in prose[True] if line)
    assert " ".join(" ".join(prose[True]).split()) == " ".join(" ".join(prose[False]).split())
    assert max(map(len, prose[False])) > 200


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    with (
        Child("demo.resume", str(tmp_path / "nope"), "1x1", "latest", "0") as child,
        pytest.raises(Failed, match=r"ended with code 1: .*nope"),
    ):
        list(child.events())


def test_a_demo_whose_process_fails_is_not_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.fail(monkeypatch, story, "train_and_kill", Failed("it fell over"))
    proofs = story.tell(Console(width=100, quiet=True), seconds=1.0, folder=tmp_path, kept=True)
    assert [(proof.held, proof.detail) for proof in proofs] == [(False, "it fell over")]


def test_the_curve() -> None:
    assert curve([]) == ""
    assert curve([1.0]) == "▁"
    assert curve(list(range(100)), cells=8) == "▁▂▃▄▅▆▇█"


@pytest.mark.parametrize("terminal", [True, False])
def test_the_display_shows_the_last_loss(terminal: bool) -> None:
    console = Console(force_terminal=terminal, width=80, record=True, quiet=False)
    with console.capture() as captured, TrainingDisplay(console, 1.0, blocks=True) as display:
        display.compiled()
        for loss in (4.0, 3.0, 2.5):
            display.show(loss)
    assert "loss" in captured.get()


@pytest.fixture(scope="module")
def short_demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("demo") / "files"
    done = treering("--seconds", "1", "--keep", str(folder), module="demo", timeout=500)
    return done, folder


@pytest.mark.slow
def test_the_short_form_proves_everything(short_demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, folder = short_demo
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert done.stdout.count("✓") == 8
    assert "✗" not in done.stdout
    assert "\x1b" not in done.stdout
    assert re.search(r"saving step_\d+, \d+\.\d+ MiB of it were written when SIGKILL ended it", done.stdout)
    assert "Moved to 2x2, every bit is there" in done.stdout
    assert "Moved to 1x1, every bit is there" in done.stdout
    assert re.search(r"The loop stood still [\d.]+ \w+ for a save \(median\)", done.stdout)
    assert re.search(r"leaf 'state/params/pairs' is damaged: bytes \d+ to \d+ of step_\d{8}/data-", done.stdout)
    cut = re.search(r"CorruptError: .*params/pairs.*hint|CorruptError: .*params/pairs.*;", done.stdout) is None
    assert not cut, "a message was cut"
    losses = re.findall(r"0x1\.[0-9a-f]+p[+-]\d+", done.stdout)
    assert len(losses) == 4
    assert len(set(losses)) == 1
    assert max(map(len, done.stdout.splitlines()[-12:])) < 200
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert done.stdout.rstrip().endswith(f"is in {folder / 'report.html'}.")
    assert b"KeepLast(3)" in (folder / "report.html").read_bytes()


@pytest.mark.slow
def test_the_kept_run_opens_and_is_not_overwritten(short_demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    folder = short_demo[1]
    run = str(folder / FILES[0])
    listed = treering("inspect", run, "state/params", "--depth", "2", code=0).stdout
    assert re.search(r"shown: 20 leaves, 4\.\d\d M parameters", listed)
    assert "is whole: " in treering("verify", run, code=0).stdout
    assert treering("log", run, code=0).stdout.count("KeepLast(3)") == 4
    assert "is not overwritten" in treering("--keep", str(folder), module="demo", code=2).stderr


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    done = treering("--keep", str(tmp_path / "file" / "below"), module="demo", code=2)
    assert done.stderr.startswith("error: could not make the folder")


def test_neither_the_verb_nor_the_story_imports_jax() -> None:
    program = "import sys, demo.__main__; assert not {'jax', 'numpy', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
    program = "import sys, demo.story; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("arguments", [["demo"], ["demo", "--seconds", "3"], ["demo", "--help"], ["help", "demo"]])
def test_the_verb_says_where_the_demo_is(arguments: list[str]) -> None:
    error, hint = here(*arguments, code=2).stderr.splitlines()
    assert error == (
        "error: the demo is not installed with treering; run `python3 dev.py demo` in a checkout of its sources"
    )
    assert hint.startswith("hint: ")
