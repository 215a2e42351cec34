"""treering demo: its parts, and the whole of it in short."""

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
from tests.cli.command import treering
from treering._cli.demo import FILES, digests, meshes, model, story, text
from treering._cli.demo.children import Child, Failed
from treering._cli.demo.display import TrainingDisplay, curve
from treering._cli.demo.evidence import Evidence, compared

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


def test_training_lowers_the_loss_and_moves_every_part(corpus: text.Corpus) -> None:
    first, state = model.start(TINY._replace(alphabet_size=len(corpus.alphabet))), tiny(corpus)
    step = meshes.stepper(state, meshes.mesh_of(1, 1))
    losses = []
    for _ in range(30):
        state, loss = step(state, text.batch_at(corpus, state.position, 2))
        losses.append(float(loss))
    assert np.mean(losses[-5:]) < losses[0] - 0.2
    assert (state.step, state.position, int(state.adam.count)) == (30, 60, 30)
    changed = jax.tree.map(lambda a, b: bool(np.any(np.asarray(a) != np.asarray(b))), first.params, state.params)
    assert all(jax.tree.leaves(changed))
    assert digests.fingerprints(first.key) != digests.fingerprints(state.key)


def test_every_rule_cuts_something(corpus: text.Corpus) -> None:
    keys = digests.fingerprints(tiny(corpus))
    for pattern, _ in meshes.RULES:
        assert any(re.search(pattern, key) for key in keys)


def test_the_next_loss_depends_on_everything_that_is_saved(corpus: text.Corpus) -> None:
    state = tiny(corpus)
    batch = text.batch_at(corpus, 0, 2)
    here = digests.evidence_of(state, batch, mesh="1x1")
    assert digests.evidence_of(state, batch, mesh="1x1") == here
    assert model.loss_of(state._replace(key=jax.random.key(7)), batch).hex() != here.next_loss
    assert model.loss_of(state, text.batch_at(corpus, 99, 2)).hex() != here.next_loss


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
    stage = story._Stage(console=Console(width=100), folder=tmp_path, kept=True, symbols=False)
    story._close(stage, [bits])
    assert "NO" in capsys.readouterr().out


@pytest.fixture
def stage(tmp_path: Path) -> story._Stage:
    package.save(tmp_path / FILES[0], {"w": np.arange(100.0), "step": 3})
    return story._Stage(console=Console(width=100), folder=tmp_path, kept=True, symbols=False)


def test_what_a_save_leaves_is_found(stage: story._Stage) -> None:
    assert story._nothing_left(stage).held
    (stage.checkpoint / "data-left").write_bytes(b"")
    assert not story._nothing_left(stage).held


def test_a_kill_that_did_harm_is_found(stage: story._Stage) -> None:
    trained = story._Trained(saves=[{"step": 3}])
    assert story._kill_did_no_harm(stage, trained).held
    assert not story._kill_did_no_harm(stage, story._Trained(saves=[{"step": 4}])).held
    next(stage.checkpoint.glob("data-*")).unlink()
    assert not story._kill_did_no_harm(stage, trained).held


def test_damage_is_undone_and_a_silent_load_is_found(stage: story._Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [proof.held for proof in story._damage(stage)] == [True]
    assert package.verify(stage.checkpoint).ok
    monkeypatch.setattr(story, "_complaint", lambda *_: "")
    assert [proof.held for proof in story._damage(stage)] == [False]


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    with (
        Child("treering._cli.demo.resume", str(tmp_path / "nope")) as child,
        pytest.raises(Failed, match=r"ended with code 1: .*nope"),
    ):
        list(child.events())


def test_a_demo_whose_process_fails_is_not_proved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise Failed("it fell over")

    monkeypatch.setattr(story, "_train_and_kill", fails)
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
    done = treering("demo", "--seconds", "2", "--keep", str(folder), timeout=240)
    return done, folder


def test_the_short_form_proves_everything(short_demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, folder = short_demo
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert done.stdout.count("✓") == 6
    assert "✗" not in done.stdout
    assert "\x1b" not in done.stdout
    assert "of the save that was killed" in done.stdout
    assert re.search(r"leaf 'params/pairs' is damaged: bytes \d+ to \d+", done.stdout)
    assert re.search(r"Corrupt: .*params/pairs.*hint|Corrupt: .*params/pairs.*;", done.stdout), "a message was cut"
    losses = re.findall(r"0x1\.[0-9a-f]+p[+-]\d+", done.stdout)
    assert len(losses) == 2
    assert losses[0] == losses[1]
    assert max(map(len, done.stdout.splitlines()[-12:])) < 200
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)


def test_the_kept_checkpoint_opens_and_is_not_overwritten(
    short_demo: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    folder = short_demo[1]
    checkpoint = str(folder / FILES[0])
    listed = treering("inspect", checkpoint, "params", "--depth", "1", code=0).stdout
    assert re.search(r"shown: 20 leaves, 4\.\d\d M parameters", listed)
    assert "is whole" in treering("verify", checkpoint, code=0).stdout
    assert "is not overwritten" in treering("demo", "--keep", str(folder), code=2).stderr


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    done = treering("demo", "--keep", str(tmp_path / "file" / "below"), code=2)
    assert done.stderr.startswith("error: could not make the folder")


def test_neither_the_verb_nor_the_story_imports_jax() -> None:
    program = "import sys, treering._cli.demo.verb; assert not {'jax', 'numpy', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
    program = "import sys, treering._cli.demo.story; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
