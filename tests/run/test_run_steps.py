"""What is known of a run's steps, what ``run.json`` spares, and that it never lies."""

import dataclasses
import errno
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering as tr
from tests import faults
from treering._checkpoint import source
from treering._checkpoint.detect import Form, detect
from treering._codec.key_document import placeholder
from treering._format import document
from treering._format.run_document import RunDocument, StepNote, add_note, encode_run, parse_run
from treering._runs import gc, steps
from treering._runs.folder import RunFolder
from treering._runs.gc import KnownSteps, collect, judge, remove_steps
from treering._runs.run_state import RunState
from treering._runs.save_step import Order, collect_after
from treering._runs.steps import missing_step, note_records, records_in, records_of, step_path, steps_of
from treering._store.posix.folder import Folder
from treering.errors import BusyError, CorruptError, FormatError, NotFoundError, StoreError
from treering.rules import KeepBest, KeepLast, Policy, StepFacts, retained


def save(run: Path, step: int, **note: Any) -> None:
    facts: dict[str, Any] = {"saved": 1000.0 + step, "metrics": {"loss": 1 / (step + 1)}} | note
    tree = {"w": np.arange(10.0) + step}
    tr.save(step_path(run, step), tree, metadata=add_note({"by": "me"}, StepNote(step=step, **facts)), overwrite=True)


def facts_of(path: Path) -> list[StepFacts]:
    """Return what rules are asked about the steps of a run, as far as they can be read."""
    fields = [field.name for field in dataclasses.fields(StepFacts)]
    return [StepFacts(**{name: getattr(record, name) for name in fields}) for record in records_of(path).steps]


def note_step(
    run: Path, step: int, *, seconds: float | None = None, keep: str | None = None, save_every: str | None = None
) -> None:
    """Note the steps that are there, with how long the save of one took and under which policies."""
    with RunFolder(run) as folder:
        found = records_in(folder)
        noted = (dataclasses.replace(each, seconds=seconds) if each.step == step else each for each in found.steps)
        note_records(folder, dataclasses.replace(found, keep=keep, save_every=save_every, steps=tuple(noted)))


def after(run: Path, step: int, keep: Policy | None, known: KnownSteps | None = None) -> None:
    """Do what follows the commit of a step, as the first save of a program does."""
    state = RunState(run, keep=keep, save_every=None, timeout=None)
    state.known = known or state.known
    collect_after(state, step, Order(), seconds=0.5)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    for step in (10, 20, 30):
        save(path, step)
        note_step(path, step, seconds=step / 10, keep="KeepLast(2)", save_every="SaveEvery(steps=10)")
    return path


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the indexes that were read as a whole."""
    sizes: list[int] = []

    def counted(data: bytes) -> Any:
        sizes.append(len(data))
        return real(data)

    real = document.read_summary
    monkeypatch.setattr(steps, "read_summary", counted)
    return sizes


class TestFacts:
    def test_of_a_run(self, run: Path, parsed: list[int]) -> None:
        assert steps_of(run) == [10, 20, 30]
        sizes = [sum(path.stat().st_size for path in step_path(run, step).iterdir()) for step in (10, 20, 30)]
        assert facts_of(run) == [
            StepFacts(step=step, saved=1000.0 + step, metrics={"loss": 1 / (step + 1)}, temporary=False, nbytes=size)
            for step, size in zip((10, 20, 30), sizes, strict=True)
        ]
        records = records_of(run)
        assert [record.seconds for record in records.steps] == [1.0, 2.0, 3.0]
        assert (records.keep, records.save_every) == ("KeepLast(2)", "SaveEvery(steps=10)")
        assert records.unreadable == {}
        assert parsed == []

    def test_where_there_is_no_run(self, tmp_path: Path) -> None:
        nowhere = tmp_path / "nowhere"
        assert steps_of(nowhere) == []
        assert facts_of(nowhere) == []
        assert collect(nowhere, KeepLast(1)) == []
        remove_steps(nowhere, [3])
        assert not nowhere.exists()

    def test_a_file_is_no_run(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        for ask in (steps_of, facts_of):
            with pytest.raises(StoreError, match="file"):
                ask(tmp_path / "file")

    @pytest.mark.parametrize("content", [None, b"", b"{", b'{"treering_run": 2,\n}', b"\xff" * 1000])
    def test_without_the_document_the_steps_say_it(self, run: Path, content: bytes | None, parsed: list[int]) -> None:
        wanted = facts_of(run)
        (run / "run.json").unlink()
        if content is not None:
            (run / "run.json").write_bytes(content)
        assert facts_of(run) == wanted
        assert len(parsed) == 3
        assert [record.seconds for record in records_of(run).steps] == [None] * 3
        collect(run, None)
        parsed.clear()
        assert facts_of(run) == wanted
        assert parsed == []

    def test_a_step_that_was_saved_anew_is_noticed(self, run: Path, parsed: list[int]) -> None:
        """Of the same size, at the same time even."""
        index = step_path(run, 20) / "treering.json"
        before = index.stat()
        save(run, 20, metrics={"loss": 1 / 23})
        os.utime(index, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert [facts.metrics["loss"] for facts in facts_of(run)] == [1 / 11, 1 / 23, 1 / 31]
        assert len(parsed) == 1
        assert [record.seconds for record in records_of(run).steps] == [1.0, None, 3.0]

    def test_so_are_one_that_came_and_one_that_went(self, run: Path) -> None:
        save(run, 40)
        shutil.rmtree(step_path(run, 10))
        assert [facts.step for facts in facts_of(run)] == [20, 30, 40]

    def test_a_copy_of_the_folder_is_believed(self, run: Path, tmp_path: Path, parsed: list[int]) -> None:
        shutil.copytree(run, tmp_path / "copy")
        assert facts_of(tmp_path / "copy") == facts_of(run)
        assert parsed == []

    def test_a_document_about_other_steps_is_of_no_harm(self, run: Path, tmp_path: Path) -> None:
        other = tmp_path / "other"
        for step in (10, 20, 30):
            save(other, step, metrics={"loss": 7.0}, temporary=True)
            note_step(other, step)
        wanted = facts_of(run)
        shutil.copy(other / "run.json", run / "run.json")
        assert facts_of(run) == wanted

    def test_a_checkpoint_that_was_saved_by_hand_counts(self, run: Path) -> None:
        before = time.time()
        tr.save(step_path(run, 40), {"w": 1}, metadata={"treering": "mine"})
        tr.save(step_path(run, 50), {"w": 1})
        os.utime(step_path(run, 50) / "treering.json", (1e15, 1e15))
        by_hand, strange = facts_of(run)[-2:]
        assert (by_hand.step, by_hand.metrics, by_hand.temporary) == (40, {}, False)
        assert before - 5 <= by_hand.saved <= time.time() + 5
        note_step(run, 50)  # the time of a file may be none
        assert facts_of(run)[-1].saved == pytest.approx(strange.saved)

    def test_the_name_of_the_folder_says_which_step(self, run: Path) -> None:
        step_path(run, 30).rename(step_path(run, 35))
        assert [facts.step for facts in facts_of(run)] == [10, 20, 35]

    def test_a_damaged_step_is_told_and_not_judged(self, run: Path) -> None:
        index = step_path(run, 20) / "treering.json"
        index.write_bytes(index.read_bytes().replace(b"metadata", b"metadatA"))
        (run / "run.json").unlink()
        records = records_of(run)
        assert [record.step for record in records.steps] == [10, 30]
        assert isinstance(records.unreadable[20], CorruptError)
        assert "step_00000020" in str(records.unreadable[20])
        assert steps_of(run) == [10, 20, 30]
        assert [verdict.step for verdict in collect(run, KeepLast(1))] == [10, 30]
        assert steps_of(run) == [20, 30]

    def test_a_step_that_cannot_be_read_now_is_an_error(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        faults.fail(monkeypatch, os, "open", errno.EIO, when=lambda name, *_, **__: str(name).endswith("treering.json"))
        with pytest.raises(StoreError, match="step_00000010"):
            facts_of(run)


class TestTheDocument:
    def test_other_policies_replace_the_old_ones(self, run: Path) -> None:
        note_step(run, 30, keep="KeepLast(9)")
        assert (records_of(run).keep, records_of(run).save_every) == ("KeepLast(9)", None)

    def test_it_is_not_written_where_nothing_has_changed(self, run: Path) -> None:
        before = (run / "run.json").stat()
        collect(run, None)
        assert (run / "run.json").stat().st_ino == before.st_ino

    def test_hostile_ones(self, run: Path, tmp_path: Path) -> None:
        wanted = facts_of(run)
        document = run / "run.json"
        lying = parse_run(document.read_bytes())
        records = [*lying.steps, dataclasses.replace(lying.steps[0], step=99)]
        document.write_bytes(encode_run(RunDocument(None, None, records)))
        assert facts_of(run) == wanted
        with document.open("wb") as file:
            file.truncate(1 << 40)
        assert facts_of(run) == wanted
        document.write_bytes(
            b'{"treering_run": 1, "digest": "xxh3-128:' + b"0" * 32 + b'",\n"steps": ' + b"[" * 1_000_000
        )
        assert facts_of(run) == wanted
        document.unlink()
        (tmp_path / "precious").write_bytes(b"mine")
        document.symlink_to(tmp_path / "precious")
        assert facts_of(run) == wanted
        with pytest.raises(FormatError, match=r"run\.json"):
            note_step(run, 30)
        assert (tmp_path / "precious").read_bytes() == b"mine"


class TestCollecting:
    def test_a_dry_run_only_judges(self, run: Path) -> None:
        before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
        verdicts = judge(run, KeepLast(1))
        assert [(verdict.step, verdict.kept) for verdict in verdicts] == [(10, False), (20, False), (30, True)]
        assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before

    def test_what_no_rule_keeps_goes(self, run: Path) -> None:
        save(run, 5, metrics={"loss": 0.0})
        collect(run, KeepLast(1) | KeepBest("loss"))
        assert steps_of(run) == [5, 30]
        assert {path.name for path in run.iterdir()} == {"run.json", "step_00000005", "step_00000030"}
        assert [record.step for record in parse_run((run / "run.json").read_bytes()).steps] == [5, 30]
        assert records_of(run).keep == "KeepLast(2)"

    def test_temporary_steps_go_though_all_is_kept(self, run: Path) -> None:
        save(run, 25, temporary=True)
        collect(run, None)
        assert steps_of(run) == [10, 20, 30]

    def test_a_step_that_was_saved_anew_since_it_was_judged_stays(
        self, run: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def late(*asked: Any) -> Any:
            save(run, 10)
            return retained(*asked)

        monkeypatch.setattr(gc, "retained", late)
        collect(run, KeepLast(1))
        assert steps_of(run) == [10, 30]

    def test_a_step_that_somebody_saves_to_is_for_the_next_time(self, run: Path) -> None:
        with Folder(str(step_path(run, 10))) as folder:
            assert folder.lock()
            collect(run, KeepLast(1))
            assert steps_of(run) == [10, 30]
            with pytest.raises(BusyError, match="step_00000010"):
                remove_steps(run, [10])
            folder.unlock()
        collect(run, KeepLast(1))
        assert steps_of(run) == [30]

    def test_one_that_fails_does_not_keep_the_others(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            faults.fail(
                patch,
                Folder,
                "remove",
                errno.EIO,
                when=lambda folder, name: folder.path.endswith("10") and name.startswith("data-"),
            )
            with pytest.raises(StoreError, match="step_00000010"):
                collect(run, KeepLast(1))
        assert steps_of(run) == [30]
        assert [record.step for record in parse_run((run / "run.json").read_bytes()).steps] == [30]
        assert step_path(run, 10).exists()
        collect(run, KeepLast(1))
        assert not step_path(run, 10).exists()

    def test_what_died_is_swept(self, run: Path) -> None:
        died = step_path(run, 40)
        died.mkdir()
        (died / f".treering.json.{'a' * 16}.treering-tmp").write_bytes(b"")
        (died / f"data-{'a' * 16}-00000-of-00001.safetensors").write_bytes(b"half")
        (step_path(run, 20) / "treering.json").rename(step_path(run, 20) / f".treering.json.{'b' * 16}.removed")
        collect(run, None)
        assert {path.name for path in run.iterdir()} == {"run.json", "step_00000010", "step_00000030"}


class TestAfterAStep:
    def test_one_document_for_all_of_it(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        replaced: list[bytes] = []

        faults.before(monkeypatch, RunFolder, "replace_document", lambda opened, data, **how: replaced.append(data))
        save(run, 40)
        after(run, 40, KeepLast(2))
        assert steps_of(run) == [30, 40]
        assert [[record.step for record in parse_run(data).steps] for data in replaced] == [[30, 40]]
        records = records_of(run)
        assert (records.keep, records.save_every) == ("KeepLast(2)", None)
        assert [record.seconds for record in records.steps] == [3.0, 0.5]

    def test_what_cannot_be_removed_is_told_and_the_step_noted(
        self, run: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save(run, 40)
        faults.fail(monkeypatch, Folder, "replace", errno.EROFS)
        with pytest.raises(StoreError, match="step_00000010"):
            after(run, 40, KeepLast(1))
        assert steps_of(run) == [10, 20, 30, 40]
        assert records_of(run).steps[-1].seconds == 0.5

    def test_a_document_that_cannot_be_written_is_told(self, run: Path) -> None:
        save(run, 40)
        (run / "run.json").unlink()
        (run / "run.json").mkdir()
        with pytest.raises(FormatError, match=r"run\.json"):
            after(run, 40, KeepLast(1))
        assert steps_of(run) == [40]


class TestRemoving:
    def test_steps_whatever_a_policy_says(self, run: Path) -> None:
        remove_steps(run, [30, 20, 99])
        assert steps_of(run) == [10]
        assert not step_path(run, 20).exists()
        assert json.loads((run / "run.json").read_bytes())["steps"][0]["step"] == 10

    def test_a_damaged_one_is_gone_but_for_its_files(self, run: Path) -> None:
        (step_path(run, 30) / "treering.json").write_bytes(b"{")
        remove_steps(run, [30])
        assert steps_of(run) == [10, 20]
        left = {path.name.rpartition(".")[2] for path in step_path(run, 30).iterdir()}
        assert left == {"removed", "safetensors"}
        remove_steps(run, [30])
        assert {path.name.rpartition(".")[2] for path in step_path(run, 30).iterdir()} == left


class TestReading:
    def test_a_run_opens_at_its_latest_step(self, run: Path) -> None:
        assert detect(run) is Form.RUN
        assert tr.load(run)["w"][0] == 30
        with tr.open(run) as checkpoint:
            assert checkpoint["w"][0] == 30
        remove_steps(run, [30])
        assert tr.load(run, only="w")["w"][0] == 20

    def test_a_run_without_steps_says_so(self, run: Path) -> None:
        remove_steps(run, [10, 20, 30])
        assert detect(run) is Form.RUN
        with pytest.raises(NotFoundError, match="no step"):
            tr.load(run)

    def test_a_step_that_goes_while_it_is_opened(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def late(path: Path, *_: object) -> None:
            if path == step_path(run, 30):
                shutil.rmtree(path)

        faults.before(monkeypatch, source, "_open_files", late)
        assert tr.load(run)["w"][0] == 20

    def test_a_checkpoint_and_a_folder_of_others_are_no_runs(self, run: Path, tmp_path: Path) -> None:
        shutil.copytree(step_path(run, 10), run, dirs_exist_ok=True)
        assert detect(run) is Form.CHECKPOINT
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "run.json").write_text('{"command": "jog"}')
        (tmp_path / "mine" / "step_00000001").mkdir()
        assert detect(tmp_path / "mine") is Form.CHECKPOINT
        with pytest.raises(NotFoundError, match="no checkpoint"):
            tr.load(tmp_path / "mine")


def test_a_missing_step_names_those_that_are_there() -> None:
    assert "it has steps 1 and 2" in str(missing_step(Path("run"), 3, [1, 2]))
    assert "it has no step yet" in str(missing_step(Path("run"), 3, []))
    assert len(str(missing_step(Path("run"), 3, range(10**6)))) < 200


class TestManyAtOnce:
    def test_nothing_is_a_step_that_is_none(self, run: Path) -> None:
        def put(step: int) -> Path:
            step_path(run, step).mkdir()
            return step_path(run, step) / "treering.json"

        step_path(run, 40).mkdir()
        put(41).mkdir()
        put(42).symlink_to(step_path(run, 10) / "treering.json")
        put(43).write_bytes(placeholder())
        os.mkfifo(put(44))
        step_path(run, 45).symlink_to(step_path(run, 20))
        step_path(run, 46).write_bytes(b"")
        put(47).write_bytes(b"no index")
        assert tr.Run(run).steps() == [10, 20, 30, 47]
        with RunFolder(run) as folder:
            heads = folder.heads()
            assert heads == {step: folder.read_head(step) for step in (10, 20, 30, 47)}
        assert list(records_of(run).unreadable) == [47]

    def test_an_index_is_opened_once_and_not_asked_for_before(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        note_step(run, 30)
        opened: list[str] = []
        faults.before(monkeypatch, os, "open", lambda path, *_, **__: opened.append(os.fspath(path)))
        faults.before(monkeypatch, os, "stat", lambda path, *_, **__: opened.append(os.fspath(path)))
        judge(run, None)
        assert [name for name in opened if "step_" in name] == [
            f"{step_path(run, n).name}/treering.json" for n in (10, 20, 30)
        ]
