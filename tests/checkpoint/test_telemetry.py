"""Every save, load and removal is one line of the logger and one event of jax.monitoring, its phases are others."""

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import treering as tr
from treering.errors import NotDirectoryError, NotFoundError
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves
from treering.serialization import load_from_file, save_to_file

TREE = {"w": jnp.arange(3.0)}


@pytest.fixture
def heard() -> Iterator[list[str]]:
    events: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith("/treering/"):
            assert duration_secs >= 0
            events.append(event.removeprefix("/treering/"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


SAVES: list[tuple[Callable[[Path], Any], list[str]]] = [
    (lambda path: tr.save(path, TREE), ["save/plan", "save/write", "save/commit", "save"]),
    (
        lambda path: tr.save_async(path, TREE).result(),
        ["save/plan", "save/snapshot", "save/write", "save/commit", "save"],
    ),
    (lambda path: tr.save(path / "a.msgpack", TREE), ["save"]),
    (lambda path: tr.save(path / "a.safetensors", TREE), ["save"]),
    (lambda path: save_to_file(TREE, path / "b"), ["save"]),
    (lambda path: tree_serialize_leaves(path, TREE), ["save"]),
]


@pytest.mark.parametrize(("save", "phases"), SAVES)
def test_a_save_is_one_line_and_one_event(
    tmp_path: Path, heard: list[str], caplog: pytest.LogCaptureFixture, save: Callable[[Path], Any], phases: list[str]
) -> None:
    with caplog.at_level(logging.INFO, "treering"):
        save(tmp_path)
    assert [event for event in heard if event in {*phases, "save"}] == phases
    (line,) = [record.getMessage() for record in caplog.records if record.name == "treering"]
    assert line.startswith(f"save {str(tmp_path)!r:.{len(str(tmp_path))}}")
    assert ": done in " in line


def test_a_load_is_one_line_and_one_event(tmp_path: Path, heard: list[str], caplog: pytest.LogCaptureFixture) -> None:
    tr.save(tmp_path / "a", TREE)
    save_to_file(TREE, tmp_path / "b")
    tree_serialize_leaves(tmp_path / "c", TREE)
    heard.clear()
    with caplog.at_level(logging.INFO, "treering"):
        tr.load(tmp_path / "a")
        load_from_file(TREE, tmp_path / "b")
        tree_deserialize_leaves(tmp_path / "c")
        with pytest.raises(NotFoundError):
            tr.load(tmp_path / "d")
    assert heard[:3] == ["load/plan", "load/read", "load"]
    assert heard.count("load") == 3
    said = [record.getMessage().partition(" after ")[0].partition(" in ")[0] for record in caplog.records]
    assert said == [
        f"load {str(tmp_path / name)!r}: {end}"
        for name, end in zip("abcd", ["done"] * 3 + ["NotFoundError"], strict=True)
    ]


def test_every_event_of_the_page_is_told_of_some_work_and_no_other(tmp_path: Path) -> None:
    kinds: dict[str, str] = {}

    def hear(kind: str) -> Callable[..., None]:
        def listen(event: str, *_: float, **__: str | int) -> None:
            if event.startswith("/treering/"):
                kinds[event] = kind

        return listen

    duration, scalar, event = hear("duration"), hear("scalar"), hear("event")
    jax.monitoring.register_event_duration_secs_listener(duration)
    jax.monitoring.register_scalar_listener(scalar)
    jax.monitoring.register_event_listener(event)
    try:
        for place in (f"memory://telemetry-{os.getpid()}/run", tmp_path / "run"):
            with tr.Run(place, keep=tr.KeepLast(1), on_save_error="warn", incremental=True) as run:
                run.save(1, TREE).result()
                run.save(2, TREE).result()
                run.load()
        (tmp_path / "run" / "step_00000003").write_text("mine")
        failed = tr.Run(tmp_path / "run")
        with pytest.raises(NotDirectoryError):
            failed.save(3, TREE).result()
    finally:
        jax.monitoring.unregister_event_duration_listener(duration)
        jax.monitoring.unregister_scalar_listener(scalar)
        jax.monitoring.unregister_event_listener(event)
    page = (Path(__file__).parents[2] / "docs" / "guides" / "telemetry.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `(/treering/.*?)` \| (.*?) \|", page, re.MULTILINE))
    of_servers = {f"/treering/{name}" for name in ("requests", "retries", "sent", "received")}
    assert kinds == {name: kind for name, kind in told.items() if name not in of_servers}


def test_what_blocks_is_told_apart_from_what_happens_in_the_background(tmp_path: Path) -> None:
    threads: dict[str, set[bool]] = {}

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith("/treering/save"):
            threads.setdefault(event.removeprefix("/treering/"), set()).add(
                threading.current_thread() is threading.main_thread()
            )

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with tr.Run(tmp_path / "run") as run:
            run.save(1, TREE)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    blocking = {"save/blocked", "save/plan", "save/admit", "save/snapshot"}
    assert {name for name, here in threads.items() if here == {True}} == blocking
    assert {name for name, here in threads.items() if here == {False}} == {
        "save", "save/queue", "save/write", "save/commit",
    }  # fmt: skip


def test_a_step_that_goes_is_one_line_and_one_event(
    tmp_path: Path, heard: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    run = tr.Run(tmp_path, keep=tr.KeepLast(1))
    with caplog.at_level(logging.INFO, "treering"):
        for step in range(3):
            run.save(step, TREE)
        run.wait()
    assert (heard.count("save"), heard.count("remove")) == (3, 2)
    lines = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("remove ") and "step_00000001" in line for line in lines) == 1
