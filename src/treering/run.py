"""Runs: the checkpoints of a training loop, which steps stay, and how to resume.

``Run`` is also a name of ``treering`` itself.
"""

from __future__ import annotations

import operator
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsIndex, TypeAlias, TypeVar, Unpack, overload

from treering._runs.results import Fallback, Preemption, Resumed, RunStatus, Stateful, StepCommit, StepSave
from treering._values.outline import InNotebook
from treering.checkpoint import LOAD_DEFAULTS, LoadKeywords, later_names, moved_options

if TYPE_CHECKING:
    import jax

    from treering._runs.leases import Lease, StepWatch
    from treering._runs.run_state import RunState
    from treering._tree.placement import Shardings
    from treering._values.outline import Outline
    from treering.checkpoint import Dtypes
    from treering.rules import Cadence, Policy, Verdict

__all__ = [
    "Fallback", "Lease", "Preemption", "Resumed", "Run", "RunStatus", "Stateful", "StepCommit", "StepSave", "StepWatch",
]  # fmt: skip

T = TypeVar("T")
Progress: TypeAlias = Callable[[int, int], object]


class Run(InNotebook):
    """The checkpoints of one training run: a folder with a checkpoint for each saved step.

    ``save`` returns when treering holds a snapshot of the tree; a thread writes it. The next call that saves, loads or
    waits raises its error, at the latest the end of the program. A ``with`` block waits for all saves at its end. In a
    job of many processes all of them make the same calls; process 0 inspects the folder and removes steps.

    Args:
        path: the folder; nothing is created before the first save.
        keep: which steps stay, as ``KeepLast(3) | KeepBest("loss")``; None keeps all. The newest always stays.
        save_every: when ``save`` saves, as ``SaveEvery(steps=1000)``; None: at each call.
        timeout: seconds to wait for other processes; None: ``TREERING_TIMEOUT_S``, else 600.
        on_save_error: "warn" warns of a failed save (``treering.errors.SaveFailedWarning``) where "raise" raises its
            error. Calls that are wrong raise all the same.
        max_failures: after how many failures in a row a run that warns raises ``SavesFailedError``; None: never.
        search: other folders with steps of this run, such as a local disk beside a bucket. ``latest``, ``load`` and
            ``load_or_init`` take the newest step of all; saves go to ``path`` alone, and nothing else changes there.
        incremental: whether a save shares the data files of the step before that hold what has not changed, by hard
            links, or by copies of the server of a bucket. Each step stays whole by itself.
        full_every: with ``incremental``, every how many saves one writes everything anew; None: only where a shared
            file cannot be used any more. Damage to a shared file concerns all steps that share it.
        on_commit: a function that is called with a ``treering.run.StepCommit`` for each step once it is durable: on
            process 0, in the background, at least once; its failure is logged, and it is called again later. The step
            is held until it returns, and ``wait`` and ``close`` wait for it.

    Attributes:
        path: the folder.

    Example:
        >>> import os, tempfile
        >>> import jax.numpy as jnp
        >>> import treering as tr
        >>> path = os.path.join(tempfile.mkdtemp(), "run")
        >>> with tr.Run(path, keep=tr.KeepLast(2)) as run:
        ...     for step in (10, 20, 30):
        ...         saved = run.save(step, {"w": jnp.full(2, step)}, metrics={"loss": 1 / step})
        >>> run = tr.Run(path)
        >>> run.steps(), run.latest(), run.best("loss")
        ([20, 30], 30, 30)
        >>> run.load(20)["w"]
        Array([20, 20], dtype=int32)

    ``print(run)`` shows what ``treering log`` does.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: Policy | None = None,
        save_every: Cadence | None = None,
        timeout: float | None = None,
        on_save_error: Literal["raise", "warn"] = "raise",
        max_failures: int | None = None,
        search: Sequence[str | os.PathLike[str]] = (),
        incremental: bool = False,
        full_every: int | None = None,
        on_commit: Callable[[StepCommit], object] | None = None,
    ) -> None:
        from treering._runs.run_state import RunState

        self._state: RunState = RunState(
            path, keep=keep, save_every=save_every, timeout=timeout, on_save_error=on_save_error,
            max_failures=max_failures, search=search, incremental=incremental, full_every=full_every,
            on_commit=on_commit,
        )  # fmt: skip

    @property
    def path(self) -> Path:
        """The folder."""
        return self._state.path

    @property
    def keep(self) -> Policy | None:
        """Which steps stay. None means all."""
        return self._state.keep

    @property
    def save_every(self) -> Cadence | None:
        """When ``save`` saves. None means at each call."""
        return self._state.save_every

    # ------------------------------------------------------------------------------------------------------- saving

    @moved_options(overwrite="it is called rollback, for it removes the later steps")
    def save(
        self,
        step: SupportsIndex,
        tree: Any,
        *,
        only: str | Sequence[str] | None = None,
        dtype: Dtypes = None,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        rollback: bool = False,
        force: bool = False,
        progress: Progress | bool | None = None,
    ) -> StepSave:
        """Save a step in the background, atomically, if ``save_every`` says so; return what was done, and why.

        You may change, donate or delete the tree when this returns. A dict of items is the usual tree:
        ``{"state": state, "data": iterator, "config": {...}}`` is saved together or not at all. An item with
        ``get_state()`` and ``set_state(state)``, such as a data iterator, is saved as the result of ``get_state()``. In
        a job of many processes, leaves that each process holds by itself are taken from process 0. Such a state has to
        be the same on all processes; mark an item of which each has another one with `treering.each`.

        Args:
            step: its number, 0 or more.
            tree: any pytree, as for ``treering.save``.
            only: as for ``treering.save``; ``load_or_init`` initialises what such a step does not have.
            dtype: as for ``treering.save_async``.
            metrics: numbers by name, for ``best`` and ``KeepBest``: Python's, numpy's, or jax scalars.
            metadata: JSON to store beside the tree; its member "treering" is reserved.
            rollback: go on from an older step: replace ``step`` if it exists, and discard the later ones. They are
                gone when the new one is committed; their files are removed after that.
            force: save whatever ``save_every`` says.
            progress: as for ``treering.save_async``.

        Raises:
            ExistsError: the step or a later one exists; also a ``FileExistsError``.
            UnsupportedError: something cannot be stored, or is not a step, metric or metadata; nothing was written.
            ClosedError: the run was closed.
            TreeringError: an earlier save of this run failed; this one was not begun. With ``on_save_error="warn"``
                it is begun after a warning, unless ``max_failures`` is reached.

        Example:
            >>> import os, tempfile
            >>> import treering as tr
            >>> run = tr.Run(os.path.join(tempfile.mkdtemp(), "run"), save_every=tr.SaveEvery(steps=100))
            >>> done = run.save(100, {"w": 1.5}, metrics={"loss": 0.25})
            >>> bool(done), bool(run.save(101, {"w": 1.25}))
            (True, False)
            >>> run.close()
        """
        from treering._runs.save_step import save_step

        return save_step(
            self._state, step, tree, only=only, dtype=dtype, metrics=metrics, metadata=metadata, rollback=rollback,
            force=force, progress=progress,
        )  # fmt: skip

    def save_on_signal(self, signum: int = signal.SIGTERM, *, grace: float | None = None) -> None:
        """Save the next step when a signal comes, then re-raise the signal.

        The handler only sets a flag. The next ``save``, on all processes, saves whatever ``save_every`` says, waits
        until the step is durable, restores the previous handler, and re-raises the signal. treering installs no handler
        unless you call this.

        Args:
            signum: the signal, such as ``signal.SIGTERM``.
            grace: seconds from the signal until the process is killed, if they are known. The last save then waits for
                other processes only as long as is left, 5 s at least, and ``preempted`` tells the deadline.

        Raises:
            UnsupportedError: this is not the main thread, the signal cannot be caught, or ``grace`` is no such number.
            ClosedError: the run was closed, so no ``save`` would notice the signal.

        Example:
            >>> import os, tempfile
            >>> run = Run(os.path.join(tempfile.mkdtemp(), "run"))
            >>> run.save_on_signal(signal.SIGUSR1)
            >>> run.close()                            # restores the handler
        """
        self._state.require_open()
        self._state.signals.watch(signum, grace)

    def preempted(self, step: SupportsIndex, *, batch: SupportsIndex = 0) -> Preemption | None:
        """Tell, between saves, whether the job is to end soon; the next ``save`` is then the last, and is waited for.

        Call it where a loop does not save for long, in evaluations and while it waits for data. All processes of a job
        call it at the same steps and batches, and get the same answer there. Nobody waits for another one: jax's
        preemption service agrees in the background on where all hear of it, about a second after the signal. It tells
        of one preemption in the life of a job.

        Args:
            step: where the loop is; counted alike on all processes.
            batch: where within the step, for a loop in it. A place that was asked about has one answer.

        Returns:
            Why, and with ``grace`` of ``save_on_signal`` the deadline; None while nothing has happened.

        Raises:
            UnsupportedError: there are several processes, and jax cannot tell the others: its preemption service is
                off, or its handler of SIGTERM was replaced before ``save_on_signal``.

        Example:
            >>> import os, tempfile
            >>> run = Run(os.path.join(tempfile.mkdtemp(), "run"), save_every=None)
            >>> run.save_on_signal(signal.SIGUSR1, grace=30)
            >>> for batch in range(100):
            ...     if preemption := run.preempted(7, batch=batch):
            ...         break
            ...     if batch == 2:
            ...         signal.raise_signal(signal.SIGUSR1)    # in practice the scheduler sends it
            >>> batch, preemption.reason, preemption.seconds_left > 20
            (3, 'SIGUSR1 came', True)
            >>> before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            >>> run.close()
        """
        from treering._arrays.host import this_processes

        return self._state.schedule.preempted(operator.index(step), operator.index(batch), this_processes(()))

    # ------------------------------------------------------------------------------------------------------ loading

    @overload
    def load(
        self, step: SupportsIndex | None = ..., like: EllipsisType | None = ..., *, fallback: bool | Fallback = ...,
        **options: Unpack[LoadKeywords],
    ) -> Any: ...  # fmt: skip

    @overload
    def load(
        self, step: SupportsIndex | None = ..., like: T = ..., *, fallback: bool | Fallback = ...,
        **options: Unpack[LoadKeywords],
    ) -> T: ...  # fmt: skip

    @moved_options(LoadKeywords, LOAD_DEFAULTS, rename="pass the dict as key_map=")
    def load(
        self, step: SupportsIndex | None = None, like: Any = None, *, fallback: bool | Fallback = False,
        **options: Unpack[LoadKeywords],
    ) -> Any:  # fmt: skip
        """Load a step, or a part of it, and check every byte.

        An object in ``like`` that has ``get_state()`` and ``set_state(state)``, where only dicts lead to it, gets the
        saved state after everything else was loaded; the result contains the object.

        Args:
            step: its number; None: the latest. In a job of many processes all call this, and process 0 decides which.
            like: the structure, shapes and dtypes wanted, as for ``treering.load``.
            fallback: go back to an earlier step, with a warning (``treering.errors.StepPassedOverWarning``), where the
                latest is damaged; with a `Fallback` also where it was tried too often.
            options: those of ``treering.load``. Default of ``timeout``: the run's.

        Raises:
            NotFoundError: there is no such step; the error lists the steps that exist.
            CorruptError: the step is damaged; with ``fallback`` all steps are, and the error says of each why.
            TreeringError: as ``treering.load``; or an earlier save of this run failed.

        Example:
            >>> import os, tempfile
            >>> run = Run(os.path.join(tempfile.mkdtemp(), "run"))
            >>> saved = run.save(7, {"params": {"w": 1.5}, "count": 3})
            >>> run.load(), run.load(7, at="params")
            ({'params': {'w': 1.5}, 'count': 3}, {'w': 1.5})
            >>> run.close()
        """
        from treering._checkpoint.load import LoadOptions
        from treering._runs.load_step import load_step

        return load_step(self._state, step, like, LoadOptions.of(options), fallback)

    def load_or_init(
        self,
        init_fn: Callable[[], T],
        *,
        shardings: Shardings = None,
        mesh: jax.sharding.Mesh | None = None,
        extra: Literal["error", "ignore"] = "error",
        progress: Progress | bool | None = None,
        fallback: bool | Fallback = False,
    ) -> Resumed[T]:
        """Load the latest step, and initialise the leaves that it lacks; without a step, initialise everything.

        ``init_fn`` is only traced for leaves that are loaded, so their arrays are never computed. One jitted call
        initialises the others, each on its sharding. A data iterator in the dict of ``init_fn`` gets the saved state,
        as in ``load``; so does any object with ``get_state()`` and ``set_state(state)``.

        Args:
            init_fn: a function without arguments that returns the tree; it is traced, as by ``jax.jit``.
            shardings: as for ``treering.load``.
            mesh: the mesh of partition specs.
            extra: as for ``load``; leaves that ``init_fn`` does not return are also missing in the next save.
            progress: as for ``load``.
            fallback: as for ``load``. Where there are steps, nothing is ever begun anew.

        Returns:
            The step, or None if nothing was saved, and the tree; ``initialised`` names the leaves that were not
            loaded. If a step lacks leaves, a warning (``treering.errors.LeavesInitialisedWarning``) names them too.

        Raises:
            MismatchError: stored leaves differ in shape or dtype, or ``init_fn`` lacks them; the error names all.
            TreeringError: as ``load``.

        Example:
            >>> import os, tempfile, jax
            >>> run = Run(os.path.join(tempfile.mkdtemp(), "run"))
            >>> step, state = run.load_or_init(lambda: {"w": jax.numpy.zeros(2)})
            >>> step, state["w"].sum()
            (None, Array(0., dtype=float32))
            >>> saved = run.save(1, {"w": state["w"] + 1})
            >>> resumed = run.load_or_init(lambda: {"w": jax.numpy.zeros(2)})
            >>> resumed.step, resumed.tree["w"].sum(), resumed.initialised
            (1, Array(2., dtype=float32), ())
            >>> run.close()
        """
        from treering._checkpoint.load import LoadOptions
        from treering._runs.load_step import load_or_init

        options = LoadOptions.of({"shardings": shardings, "mesh": mesh, "extra": extra, "progress": progress})
        return load_or_init(self._state, init_fn, options, fallback)

    def attempts(self, step: SupportsIndex) -> int:
        """Return how often the run was resumed from a step without a newer one since; 0 where that is not counted.

        ``load`` and ``load_or_init`` count with ``fallback=Fallback(...)`` alone. A step that was passed over does not
        count as a newer one.

        Raises:
            NotFoundError: there is no such step; the error lists the steps that exist.

        Example:
            >>> import os, tempfile
            >>> run = Run(os.path.join(tempfile.mkdtemp(), "run"))
            >>> with run:
            ...     saved = run.save(7, {"w": 1.5})
            >>> loaded = [Run(run.path).load(fallback=Fallback(max_attempts=3)) for _ in range(2)]
            >>> run.attempts(7)
            2
        """
        from treering._runs.fallback import count_attempts
        from treering._runs.run_state import require_step_number

        return count_attempts(self._state, require_step_number(step))

    # ------------------------------------------------------------------------------------------------ what is there

    def steps(self) -> list[int]:
        """Return the committed steps, the oldest first. A save that is still being written is not one of them."""
        from treering._runs.steps import steps_of

        return steps_of(self.path)

    def latest(self) -> int | None:
        """Return the last step; None if there is none. With ``search``, it may be one of another folder."""
        from treering._runs.steps import latest_of

        if not self._state.roots[1:]:
            return latest_of(self.path)
        from treering._runs.fallback import newest_step

        return newest_step(self._state)

    def best(self, metric: str, mode: Literal["min", "max"] = "min") -> int | None:
        """Return the step whose metric is best, the later of two equal ones; None if the run has no step yet.

        Args:
            metric: its name. A step without it, or with nan, is never best.
            mode: whether the smallest or the largest value is best.

        Raises:
            NotFoundError: the run has steps, but none with this metric; the error suggests the nearest name.

        Example:
            >>> import os, tempfile
            >>> run = Run(os.path.join(tempfile.mkdtemp(), "run"))
            >>> with run:
            ...     saved = run.save(1, {"w": 1.5}, metrics={"loss": 0.25})
            >>> run.best("los")
            Traceback (most recent call last):
            ...
            treering.errors.NotFoundError: no step of the run '...' has the metric 'los'; did you mean 'loss'?
        """
        return self._state.best(metric, mode)

    def metrics(self, step: SupportsIndex) -> dict[str, float]:
        """Return the metrics of a step.

        Raises:
            NotFoundError: there is no such step; the error lists the steps that exist.
        """
        return self._state.metrics(step)

    # ---------------------------------------------------------------------------------------- beside another program

    def watch(
        self, *, after: SupportsIndex | None = None, timeout: float | None = None, hold: bool = False
    ) -> StepWatch:
        """Yield each step once as it becomes durable, in order: first those that are there, then those that come.

        For an evaluator beside the training: ``for step in run.watch(hold=True)``, or ``async for``. A look is one
        request to a bucket, whatever the number of steps. Once the training has gone back (``rollback=True``), the
        steps that it saves from there on are new ones, also under numbers that were yielded before. A step that is
        removed before its turn is left out. In a job of many processes all iterate, and process 0 decides; after an
        error, such as that one did not come, the step before may come once more, for some may not have heard of it.

        Args:
            after: leave out the steps up to this one; None: yield all.
            timeout: end when no new step came for so many seconds, 0: at once; None: never.
            hold: whether each step is held until the next one is asked for, so that it is not removed meanwhile.

        Raises:
            StoreError: the system refuses.

        Example:
            >>> import os, tempfile
            >>> with Run(os.path.join(tempfile.mkdtemp(), "run")) as run:
            ...     saved = [run.save(step, {"w": step}) for step in (1, 2, 3)]
            >>> for step in run.watch(after=1, timeout=0, hold=True):
            ...     print(step, run.load(step))
            2 {'w': 2}
            3 {'w': 3}
        """
        return self._state.watch(after=after, timeout=timeout, hold=hold)

    def hold(self, step: SupportsIndex, *, seconds: float = 60.0) -> Lease:
        """Keep a step from being removed until the lease is released: by ``keep``, ``gc``, ``delete`` or a rollback.

        Args:
            step: its number.
            seconds: how long the lease counts after it was last renewed, 1 to 86,400. A thread renews it. That of a
                process that was killed ends by itself, by the clock of the store.

        Raises:
            NotFoundError: there is no such step, or it is gone before the lease counts.
            BusyError: it is about to be removed.
            StoreError: the system refuses: a lease is a small file in the run.

        Example:
            >>> import os, tempfile
            >>> run = Run(os.path.join(tempfile.mkdtemp(), "run"))
            >>> run.save(1, {"w": 1.5}).result()
            >>> with run.hold(1):
            ...     run.delete(1)
            Traceback (most recent call last):
            ...
            treering.errors.BusyError: step 1 of '...' is not removed: it is held by ... until ...; release it there...
        """
        return self._state.hold(step, seconds)

    # ---------------------------------------------------------------------------------------------------- retention

    def gc(self, *, dry_run: bool = True) -> list[Verdict]:
        """Return for each step whether ``keep`` keeps it and by which rule; remove the others unless it is a dry run.

        Each save does this in the background. Only files of treering are removed.

        Args:
            dry_run: False to remove; this then waits for saves in flight.

        Example:
            >>> import os, tempfile
            >>> import treering as tr
            >>> run = tr.Run(os.path.join(tempfile.mkdtemp(), "run"))
            >>> with run:
            ...     saved = [run.save(step, {"w": 1.5}) for step in (1, 2, 3)]
            >>> last = tr.Run(run.path, keep=tr.KeepLast(1))
            >>> [verdict.step for verdict in last.gc() if not verdict.kept]
            [1, 2]
        """
        return self._state.collect(dry_run=dry_run)

    def delete(self, step: SupportsIndex) -> None:
        """Remove one step, whatever ``keep`` says. This waits for saves in flight; only files of treering are removed.

        Raises:
            NotFoundError: there is no such step; the error lists the steps that exist.
            BusyError: another process is saving to it, or holds it.

        Example:
            >>> import os, tempfile
            >>> with Run(os.path.join(tempfile.mkdtemp(), "run")) as run:
            ...     saved = [run.save(step, {"w": 1.5}) for step in (1, 2, 3)]
            >>> run.delete(2)
        """
        self._state.delete(step)

    def branch(
        self, step: SupportsIndex, path: str | os.PathLike[str], *, keep: Policy | None = None,
        save_every: Cadence | None = None,
    ) -> Run:  # fmt: skip
        """Start another run from a step of this one: copy the step there, durably; this run does not change.

        Args:
            step: the step to start from.
            path: the folder of the new run, which must not have steps.
            keep: which steps of the new run stay; None: as in this run.
            save_every: when the new run saves; None: as in this run.

        Raises:
            NotFoundError: there is no such step; the error lists the steps that exist.
            ExistsError: there is a run at ``path``.
            UnsupportedError: ``path`` lies in this run.

        Example:
            >>> import os, tempfile
            >>> folder = tempfile.mkdtemp()
            >>> run = Run(os.path.join(folder, "a"))
            >>> with run:
            ...     saved = [run.save(step, {"w": 1.5}) for step in (1, 2, 3)]
            >>> other = run.branch(2, os.path.join(folder, "b"))
            >>> other.steps(), run.steps()
            ([2], [1, 2, 3])
        """
        keep = self.keep if keep is None else keep
        save_every = self.save_every if save_every is None else save_every
        outcomes = self._state.outcomes
        new = Run(
            path, keep=keep, save_every=save_every, timeout=self._state.timeout,
            on_save_error="warn" if outcomes.warns else "raise", max_failures=outcomes.most,
        )  # fmt: skip
        self._state.branch(step, new._state)
        return new

    def status(self) -> RunStatus:
        """Return what a crash would cost now: the newest durable step, its age, failures in a row, what is in flight.

        It asks the store nothing: it says what this process knows by its own saves and loads.

        Example:
            >>> import os, tempfile
            >>> run = Run(os.path.join(tempfile.mkdtemp(), "run"))
            >>> run.status().step is None, run.save(7, {"w": 1.5}).result()
            (True, None)
            >>> status = run.status()
            >>> status.step, status.seconds < 60, status.failures, status.saves_in_flight
            (7, True, 0, 0)
            >>> run.close()
        """
        return self._state.outcomes.status()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every save is durable and every step that no rule keeps is removed.

        In a job of many processes process 0 removes them; the others wait for that, at most for the run's ``timeout``.

        Args:
            timeout: seconds to wait; None: without limit.

        Raises:
            TimedOutError: it takes longer.
            TreeringError: a save of this run failed. With ``on_save_error="warn"`` that is a warning, unless
                ``max_failures`` is reached.
        """
        self._state.wait(timeout)

    def close(self, *, sweep: bool = False) -> None:
        """Wait for everything, as ``wait`` does, and restore signal handlers. The run still loads, but saves no more.

        Args:
            sweep: whether to remove what superseded and removed steps have left for readers in a bucket, as far as
                their grace is over, and what dead processes left; ``gc`` does it too. On disk nothing waits.

        Raises:
            TreeringError: a save of this run failed, or something could not be removed. With ``on_save_error="warn"``
                a failed save is a warning, unless ``max_failures`` is reached; if no later one was saved, the program
                still ends with a line on stderr and a status that is not 0.
        """
        self._state.close(sweep=sweep)
        self._state.warn()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._state.leave(error)

    def __repr__(self) -> str:
        given = {"keep": self._state.keep_text, "save_every": self._state.save_every_text}
        policies = "".join(f", {name}={text}" for name, text in given.items() if text is not None)
        return f"Run({self._state.shown!r}{policies})"

    def __str__(self) -> str:
        from treering._runs.reports import run_text

        return run_text(self._state)

    def _outline(self) -> Outline:
        from treering._runs.reports import run_state_outline

        return run_state_outline(self._state, repr(self))


if not TYPE_CHECKING:  # who imports runs does not open any
    __getattr__ = later_names(__name__, dict.fromkeys(("Lease", "StepWatch"), "_runs.leases"))

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
