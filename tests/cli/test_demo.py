"""treering demo: its parts, and the whole of it in short."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from tests.cli.command import treering
from treering import serialization
from treering._cli.demo import FILES, model, prove, story, text
from treering._cli.demo.display import TrainingDisplay, curve

TINY = model.Config(alphabet_size=16, context=8, width=16, blocks=1, heads=2, batch=2, dropout=0.5)


@pytest.fixture(scope="module")
def corpus() -> text.Corpus:
    return text.load_corpus(context=8, seed=0)


def tiny(corpus: text.Corpus) -> model.TrainState:
    return model.start(TINY._replace(alphabet_size=len(corpus.alphabet)))


def test_batches_are_fixed_by_their_position(corpus: text.Corpus) -> None:
    again = text.load_corpus(context=8, seed=0)
    assert np.array_equal(text.batch_at(corpus, 40, 4), text.batch_at(again, 40, 4))
    assert not np.array_equal(text.batch_at(corpus, 40, 4), text.batch_at(corpus, 41, 4))
    windows = len(corpus.starts)
    assert np.array_equal(text.batch_at(corpus, windows, 2), text.batch_at(corpus, 0, 2))
    assert int(corpus.tokens.max()) < len(corpus.alphabet)


def test_training_lowers_the_loss_and_moves_every_part(corpus: text.Corpus) -> None:
    first = state = tiny(corpus)
    losses = []
    for _ in range(30):
        state, loss = model.train_step(state, text.batch_at(corpus, state.position, 2))
        losses.append(float(loss))
    assert np.mean(losses[-5:]) < losses[0] - 0.2
    assert (state.step, state.position, int(state.adam.count)) == (30, 60, 30)
    changed = jax.tree.map(lambda a, b: bool(np.any(np.asarray(a) != np.asarray(b))), first.params, state.params)
    assert all(jax.tree.leaves(changed))
    assert not np.array_equal(first.key, state.key)


def test_the_next_loss_depends_on_everything_that_is_saved(corpus: text.Corpus) -> None:
    state, _ = model.train_step(tiny(corpus), text.batch_at(corpus, 0, 2))
    here = prove.evidence_of(state, corpus)
    assert prove.evidence_of(state, corpus).next_loss == here.next_loss
    assert prove.evidence_of(state._replace(key=jax.random.PRNGKey(7)), corpus).next_loss != here.next_loss
    assert prove.evidence_of(state._replace(position=99), corpus).next_loss != here.next_loss


def test_fingerprints_see_every_bit() -> None:
    tree: dict[str, Any] = {"w": np.zeros(3, np.float32), "n": 1, "x": 1.0}
    base = prove.fingerprints(tree)
    for change in (
        {"w": -tree["w"]},
        {"w": tree["w"].astype(np.float16)},
        {"w": tree["w"].reshape(3, 1)},
        {"n": 1.0},
        {"n": True},
        {"x": np.nextafter(1.0, 2.0).item()},
    ):
        assert prove.fingerprints(tree | change) != base
    assert prove.fingerprints(jax.tree.map(jax.numpy.asarray, {"w": tree["w"]}))["w"] == base["w"]


def test_a_fresh_process_that_fails_says_why(tmp_path: Path) -> None:
    said = prove.from_fresh_process(tmp_path / "nope.msgpack")
    assert isinstance(said, str)
    assert "nope.msgpack" in said


class Broken:
    """A load that returns something else than what was saved."""

    def __init__(self, evidence: prove.Evidence) -> None:
        self.evidence = evidence

    def __call__(self, file: Path) -> prove.Evidence:
        leaves = self.evidence.leaves | {"params/norm": "float32[256] 0"}
        return prove.Evidence(process=1, leaves=leaves, next_loss=(1.0).hex(), load_seconds=0.1)


def test_a_proof_that_fails_is_named(
    tmp_path: Path, corpus: text.Corpus, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tiny(corpus)
    here = prove.evidence_of(state, corpus)
    file = tmp_path / "state.msgpack"
    serialization.save_to_file(state, file)
    stage = story._Stage(console=Console(width=100), folder=tmp_path, kept=True, symbols=False)
    monkeypatch.setattr(prove, "from_fresh_process", Broken(here))
    loads, goes_on = story._load_elsewhere(stage, file, here)
    assert not loads.held
    assert "params/norm" in loads.detail
    assert not goes_on.held
    monkeypatch.setattr(prove, "from_fresh_process", lambda _: "it fell over")
    assert [proof.held for proof in story._load_elsewhere(stage, file, here)] == [False, False]
    monkeypatch.setattr(story, "_complaint", lambda _: "")
    gzip_form, bit, end = story._damage(stage, file, state, here)
    assert (gzip_form.held, bit.held, end.held) == (True, False, False)
    story._close(stage, [loads, gzip_form], file)
    assert "NO" in capsys.readouterr().out


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
def short_demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path, float]:
    folder = tmp_path_factory.mktemp("demo") / "files"
    began = time.perf_counter()
    done = treering("demo", "--seconds", "2", "--keep", str(folder), timeout=120)
    return done, folder, time.perf_counter() - began


def test_the_short_form_proves_everything(short_demo: tuple[subprocess.CompletedProcess[str], Path, float]) -> None:
    done, folder, seconds = short_demo
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert done.stdout.count("✓") == 6
    assert "✗" not in done.stdout
    assert "\x1b" not in done.stdout
    assert "Corrupt: " in done.stdout
    assert "the data is cut short" in done.stdout
    assert re.search(r"Corrupt: .*\(at leaf '.+', byte \d+\)", done.stdout), "an error message was cut"
    losses = re.findall(r"0x1\.[0-9a-f]+p[+-]\d+", done.stdout)
    assert len(losses) == 2
    assert losses[0] == losses[1]
    assert max(map(len, done.stdout.splitlines()[-12:])) < 200
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert seconds < 100


def test_the_kept_file_opens_and_is_not_overwritten(
    short_demo: tuple[subprocess.CompletedProcess[str], Path, float],
) -> None:
    folder = short_demo[1]
    text_of_file = treering("inspect", str(folder / "state.msgpack"), "params", "--depth", "1", code=0).stdout
    assert re.search(r"shown: 20 leaves, 4\.\d\d M parameters", text_of_file)
    refused = treering("demo", "--keep", str(folder), code=2)
    assert "is not overwritten" in refused.stderr


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    done = treering("demo", "--keep", str(tmp_path / "file" / "below"), code=2)
    assert done.stderr.startswith("error: could not make the folder")


def test_the_verb_alone_imports_no_jax() -> None:
    program = "import sys, treering._cli.demo.verb; assert not {'jax', 'numpy', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
