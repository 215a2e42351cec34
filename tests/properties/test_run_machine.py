"""A whole run against a naive model: real files and the real thread, clocks that are told the time, calls that fail."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import treering as tr
from tests.checkpoint.in_background import wait_until_ended
from tests.run.failing_calls import refused
from tests.run.naive import METRICS, metric_values, policies, stays
from tests.run.test_cadence import cadences
from treering.errors import ExistsError, LeavesInitialisedWarning, NotFoundError, TreeringError
from treering.rules import StepFacts, best_steps

# Rules may go by a metric that no step has.
pytestmark = [
    pytest.mark.filterwarnings("ignore::treering.errors.UnknownMetricWarning"),
    pytest.mark.filterwarnings("ignore::treering.errors.LeavesInitialisedWarning"),
]

START: Final = 1_700_000_000.0
WAIT: Final = 60.0

quarters = st.integers(0, 4000).map(lambda count: count / 4)
metrics_dicts = st.dictionaries(st.sampled_from(METRICS), metric_values, max_size=2)
doors = st.sampled_from(["save", "wait", "load", "close", "result"])


@dataclasses.dataclass
class Saved:
    """What the model holds of a step."""

    facts: StepFacts
    value: int


@dataclasses.dataclass
class Rhythm:
    """The model of when a step is saved."""

    cadence: Any
    counted: int | None = None
    since: float = 0.0

    def verdict(self, step: int, now: float, latest: int | None, *, force: bool) -> tuple[bool, bool]:
        """Return whether a step is saved, and whether for the time being."""
        if self.cadence is None:
            return True, False
        if self.counted is None:
            self.counted, self.since = step - 1 if latest is None else latest, now
        due = lasting = False
        for part in getattr(self.cadence, "rules", (self.cadence,)):
            if part.steps is None:
                due |= now - self.since >= part.interval.total_seconds()
            else:
                lasting |= step % part.steps == 0 or step // part.steps > max(self.counted, 0) // part.steps
        return due or lasting or force, due and not lasting and not force


class RunMachine(RuleBasedStateMachine):
    """A loop that saves, fails, crashes, resumes and branches."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="treering-run-"))
        self.path = self.folder / "run"
        self.clock = 0.0
        self.model: dict[int, Saved] = {}
        self.values = 0
        self.branches = 0
        self.foreign: dict[Path, bytes] = {}
        self.strange: set[int] = set()

    def teardown(self) -> None:
        """Nothing of the run may be left to the end of the program."""
        self._forget_errors()
        shutil.rmtree(self.folder)

    @initialize(keep=st.none() | policies, save_every=st.none() | cadences)
    def begin(self, keep: Any, save_every: Any) -> None:
        """The program starts."""
        self._start(keep, save_every)

    # ---------------------------------------------------------------------------------------------------------- saving

    @rule(
        stride=st.integers(1, 4), seconds=quarters, metrics=metrics_dicts, force=st.sampled_from([False, False, True])
    )
    def save(self, stride: int, seconds: float, metrics: dict[str, float], force: bool) -> None:
        """The loop offers its next step."""
        step = self._next(stride)
        now, saved, temporary = self._due(step, seconds, force=force)
        done = self.run.save(step, self._tree(), metrics=metrics, force=force)
        assert (done.temporary, bool(done), done.pending is not None) == (temporary, saved, saved)
        assert done.reason
        if saved:
            self._committed(step, now, metrics, temporary=temporary)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), seconds=quarters)
    def go_back_silently(self, data: Any, seconds: float) -> None:
        """A step that is not newer is refused, if it is to be saved at all."""
        step = data.draw(st.integers(0, max(self.model)))
        _, saved, _ = self._due(step, seconds, force=True)
        assert saved
        with pytest.raises(ExistsError, match=r"there already|older than its latest step"):
            self.run.save(step, self._tree(), force=True)
        self._take_back()

    @precondition(lambda self: self.model)
    @rule(data=st.data(), seconds=quarters, metrics=metrics_dicts)
    def go_back_with_a_word(self, data: Any, seconds: float, metrics: dict[str, float]) -> None:
        """Overwriting replaces a step, and what was saved later goes."""
        step = data.draw(st.integers(0, max(self.model)))
        assume(step in self.model or step not in self.strange)
        now, _, temporary = self._due(step, seconds, force=True)
        done = self.run.save(step, self._tree(), metrics=metrics, rollback=True, force=True)
        assert done
        self.model = {number: saved for number, saved in self.model.items() if number < step}
        self._committed(step, now, metrics, temporary=temporary)

    @rule(stride=st.integers(1, 4), seconds=quarters, call=st.integers(0, 180), door=doors, back=st.booleans())
    def save_while_a_call_fails(self, stride: int, seconds: float, call: int, door: str, back: bool) -> None:
        """An error of the thread that writes is told once, at the next call of whatever kind."""
        before, step, pending = self._struck(stride, seconds, call, all_later=False, back=back)
        error, value = pending._job.error, self.values
        assert error is None or isinstance(error, TreeringError)
        if error is not None:
            with pytest.raises(TreeringError) as caught:
                self._through(door, pending)
            assert str(step) in str(caught.value) or door == "result"
            if door == "close":
                self._start(self.keep, self.save_every)
        self._adopt(before, step, value, failed=error is not None)
        self.run.wait(WAIT)

    @rule(stride=st.integers(1, 4), seconds=quarters, call=st.integers(0, 180), back=st.booleans())
    def crash_while_saving(self, stride: int, seconds: float, call: int, back: bool) -> None:
        """From one call on nothing works; then the machine comes up again."""
        before, step, _ = self._struck(stride, seconds, call, all_later=True, back=back)
        self._forget_errors()
        self._start(self.keep, self.save_every)
        self._adopt(before, step, self.values, failed=True)

    # ---------------------------------------------------------------------------------------------------------- looking

    @rule()
    def look(self) -> None:
        """All is as the model says."""
        self.run.wait(WAIT)
        assert self.run.steps() == sorted(self.model)
        assert self.run.latest() == max(self.model, default=None)
        for metric in METRICS:
            for mode in ("min", "max"):
                facts = [saved.facts for saved in self.model.values()]
                best = best_steps(facts, metric, mode)
                if best or not facts:
                    assert self.run.best(metric, mode) == next(iter(best), None)
                else:
                    with pytest.raises(NotFoundError, match=f"the metric '{metric}'|'{metric}' is nan"):
                        self.run.best(metric, mode)
        for step, saved in self.model.items():
            np.testing.assert_equal(self.run.metrics(step), dict(saved.facts.metrics))
            self._same(self.run.load(step), saved)
        for path, data in self.foreign.items():
            assert path.read_bytes() == data

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def load(self, data: Any) -> None:
        """A step can be loaded at once, whether it is written already or not."""
        step = data.draw(st.none() | st.sampled_from(sorted(self.model)))
        like = {"w": jax.ShapeDtypeStruct((300,), jnp.int32), "step": 0}
        self._same(self.run.load(step, like), self.model[max(self.model) if step is None else step])

    @rule(step=st.integers(0, 200))
    def load_what_is_not_there(self, step: int) -> None:
        """The error names what is."""
        if step not in self.model:
            self.run.wait(WAIT)
            with pytest.raises(NotFoundError, match=f"no step {step}; it has") as caught:
                self.run.load(step)
            assert not self.model or str(max(self.model)) in str(caught.value)

    @rule()
    def resume(self) -> None:
        """What is there is loaded, the rest initialised."""

        def fresh() -> dict[str, Any]:
            return {"w": jnp.zeros(300, jnp.int32), "step": 0, "new": jnp.full(2, 7)}

        there = max(self.model, default=None)
        with pytest.warns(LeavesInitialisedWarning, match="new") if there is not None else contextlib.nullcontext():
            step, tree = resumed = self.run.load_or_init(fresh)
        assert step == there
        assert tree["new"].tolist() == [7, 7]
        assert resumed.initialised == (("w", "step", "new") if step is None else ("new",))
        if step is not None:
            self._same({name: tree[name] for name in ("w", "step")}, self.model[step])

    # ---------------------------------------------------------------------------------------------------- keeping order

    @rule(keep=st.none() | policies, save_every=st.none() | cadences)
    def start_again(self, keep: Any, save_every: Any) -> None:
        """The program ends well, and another one goes on with other rules."""
        self.run.close()
        self._start(keep, save_every)

    @rule()
    def judge_and_collect(self) -> None:
        """A dry run says what stays, and then it is so."""
        self.run.wait(WAIT)
        kept = stays(self.keep, [saved.facts for saved in self.model.values()])
        verdicts = self.run.gc()
        assert self.run.steps() == sorted(self.model) == [verdict.step for verdict in verdicts]
        assert {verdict.step for verdict in verdicts if verdict.kept} == kept
        assert self.run.gc(dry_run=False) == verdicts
        self.model = {step: saved for step, saved in self.model.items() if step in kept}
        assert self.run.steps() == sorted(self.model)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), damage=st.sampled_from(["remove", "cut", "age"]))
    def lose_the_cache(self, data: Any, damage: str) -> None:
        """``run.json`` is gone, damaged, or of an earlier time."""
        self.run.wait(WAIT)
        cache = self.path / "run.json"
        if damage == "remove" or not cache.exists():
            cache.unlink(missing_ok=True)
        elif damage == "cut":
            cache.write_bytes(cache.read_bytes()[: data.draw(st.integers(0, 200))])
        else:
            old = cache.read_bytes()
            self.save(1, 0.0, {}, force=True)
            self.run.wait(WAIT)
            cache.write_bytes(old)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def put_a_file_beside(self, data: Any) -> None:
        """What is not ours stays, also in the folder of a step that goes."""
        self.run.wait(WAIT)
        step = data.draw(st.sampled_from(sorted(self.model)))
        for path in (self.path / "notes.txt", self.path / f"step_{step:08d}" / "tokenizer.json"):
            path.write_bytes(b"mine")
            self.foreign[path] = b"mine"
        self.strange.add(step)
        stray = self.path / "step_00000777"
        stray.mkdir(exist_ok=True)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def branch(self, data: Any) -> None:
        """A step goes on in a run of its own, and this one stays as it is."""
        step = data.draw(st.sampled_from(sorted(self.model)))
        self.branches += 1
        other = self.run.branch(step, self.folder / f"branch {self.branches}")
        assert other.steps() == [step]
        self._same(other.load(), self.model[step])

    # -------------------------------------------------------------------------------------------------------- the model

    def _start(self, keep: Any, save_every: Any) -> None:
        self.keep, self.save_every = keep, save_every
        self.run = tr.Run(self.path, keep=keep, save_every=save_every, timeout=WAIT)
        self.run._state.now = lambda: START + self.clock
        self.run._state.schedule._clock = lambda: self.clock
        self.rhythm = Rhythm(save_every)

    def _next(self, stride: int) -> int:
        """Return a step to save; a folder that is a user's by now is none."""
        step = max(self.model, default=-1) + stride
        while step not in self.model and step in self.strange:
            step += 1
        return step

    def _tree(self) -> dict[str, Any]:
        self.values += 1
        return {"w": jnp.full(300, self.values, jnp.int32), "step": self.values}

    def _same(self, tree: Any, saved: Saved) -> None:
        assert set(tree) == {"w", "step"}
        assert tree["step"] == saved.value
        np.testing.assert_array_equal(tree["w"], np.full(300, saved.value, np.int32))

    def _due(self, step: int, seconds: float, *, force: bool) -> tuple[float, bool, bool]:
        self.clock += seconds
        saved, temporary = self.rhythm.verdict(step, self.clock, max(self.model, default=None), force=force)
        if saved:
            self.before = (self.rhythm.counted, self.rhythm.since)
            self.rhythm.counted, self.rhythm.since = step, self.clock
        return START + self.clock, saved, temporary

    def _take_back(self) -> None:
        self.rhythm.counted, self.rhythm.since = self.before

    def _committed(self, step: int, now: float, metrics: dict[str, float], *, temporary: bool) -> None:
        facts = StepFacts(step=step, saved=now, metrics=metrics, temporary=temporary)
        self.model[step] = self.new = Saved(facts, self.values)
        kept = stays(self.keep, [saved.facts for saved in self.model.values()])
        self.model = {number: saved for number, saved in self.model.items() if number in kept}

    # ------------------------------------------------------------------------------------------------------ failures

    def _struck(
        self, stride: int, seconds: float, call: int, *, all_later: bool, back: bool
    ) -> tuple[dict[int, Saved], int, Any]:
        """Save while calls fail, an older step again if ``back``; return what was there, the step and its save."""
        self.run.wait(WAIT)
        before = dict(self.model)
        back = back and bool(self.model)
        step = max(0, max(self.model) - stride) if back else self._next(stride)
        assume(step in self.model or step not in self.strange)
        now, _, temporary = self._due(step, seconds, force=True)
        with refused(call, all_later=all_later):
            pending = self.run.save(step, self._tree(), rollback=back, force=True).pending
            assert pending is not None
            wait_until_ended(self.path)
        if back:
            self.model = {number: saved for number, saved in self.model.items() if number < step}
        self._committed(step, now, {}, temporary=temporary)
        return before, step, pending

    def _adopt(self, before: dict[int, Saved], step: int, value: int, *, failed: bool) -> None:
        """See what a failure left: the step or what was there before, and perhaps what was to be removed."""
        there = set(self.run.steps())
        if step in there and self.run.load(step)["step"] == value:
            assert set(self.model) <= there <= {*before, step}
            assert failed or there == set(self.model)
            self.model = {number: saved for number, saved in {**before, step: self.new}.items() if number in there}
        else:
            assert failed
            assert there == set(before)
            self.model = before
        for number, found in self.model.items():
            self._same(self.run.load(number), found)

    def _through(self, door: str, pending: Any) -> None:
        """Make the call that has to tell an error."""
        calls: dict[str, Callable[[], Any]] = {
            "save": lambda: self.run.save(max(self.run.steps(), default=0) + 50, self._tree(), force=True),
            "wait": lambda: self.run.wait(WAIT),
            "load": self.run.load,
            "close": self.run.close,
            "result": lambda: pending.result(WAIT),
        }
        calls[door]()

    def _forget_errors(self) -> None:
        try:
            self.run.wait(WAIT)
        except TreeringError:
            return


class TestRun(RunMachine.TestCase):  # type: ignore[misc,valid-type]
    """A few courses."""

    settings = settings(max_examples=6, stateful_step_count=12, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
class TestManyRuns(RunMachine.TestCase):  # type: ignore[misc,valid-type]
    """A minute of them."""

    settings = settings(max_examples=60, stateful_step_count=25, suppress_health_check=list(HealthCheck))
