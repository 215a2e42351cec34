"""An interrupt at any moment of a public function: nothing stays locked or open, nothing hangs."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from torture.interrupted import Scene, Strike, judged, prepared, scenes

ROOT = Path(__file__).parents[2]
SCENES = {scene.name: scene for scene in scenes()}
ENOUGH = 10_000
MORE = ["load", "open", "save_to_file", "tree_deserialize_leaves"]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is one: nothing here waits for a disk."""
    where = Path("/dev/shm")
    if not where.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=where) as folder:
        yield Path(folder)


def length(scene: Scene, kind: str, folder: Path) -> int:
    """Return at how many places of the call an interrupt can strike."""
    for _ in range(2):  # the first one imports
        path, strike = prepared(scene, folder), Strike(kind, float("inf"))
        with strike:
            scene.call(path)
    return int(strike.seen)


@pytest.mark.parametrize("name", ["overwrite", *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_an_interrupt_after_each_system_call(name: str, memory: Path) -> None:
    calls = length(SCENES[name], "system call", memory)
    assert calls > 10
    for at in [*range(1, calls - 20, 3), *range(max(1, calls - 20), calls + 1)]:
        assert not judged(SCENES[name], Strike("system call", at), memory)[1], at


def test_an_interrupt_at_each_place_of_the_end_of_a_save(memory: Path) -> None:
    scene = SCENES["overwrite"]
    places = length(scene, "place", memory)
    for at in range(places - 40, places + 1):
        assert not judged(scene, Strike("place", at), memory)[1], at


@pytest.mark.slow
def test_a_slice_of_the_attack_finds_nothing() -> None:
    command = [sys.executable, "-m", "torture", "interrupts", "--count", "200", "--seed", "11"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n0 violations" in done.stdout


def test_the_judge_sees_what_stays_open(memory: Path) -> None:
    kept: list[int] = []
    leaking = Scene("leaking", lambda _: None, lambda _: kept.append(os.open("/", os.O_RDONLY)), lambda _: None)
    _, wrong = judged(leaking, Strike("place", ENOUGH), memory)
    os.close(kept.pop())
    assert "left open" in wrong[0]


def test_the_judge_sees_another_error(memory: Path) -> None:
    failing = Scene("failing", lambda _: None, lambda _: Path("/treering/none").read_bytes(), lambda path: path.rmdir())
    _, wrong = judged(failing, Strike("place", ENOUGH), memory)
    assert "FileNotFoundError" in wrong[0]
    assert "the next call raised FileNotFoundError" in wrong[1]
