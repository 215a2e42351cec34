"""Run one benchmark: every workload, every kind of leaves, every group of cases, and then the goals.

A benchmark is one file beside this one with a ``BENCHMARK``; see ``benchmarks.msgpack``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Protocol

from benchmarks import memory
from benchmarks.measure import Group, Rounds, Spread, interleave, ratio, spread
from benchmarks.workloads import LeafKind

__all__ = ["Benchmark", "Goal", "Job", "Options", "Outcome", "Report", "Scene", "Verdict", "load", "run", "serve_peak"]

_WARM_UP = 1 / 256
_DISKS = {"/dev/vd": "a virtual disk", "/dev/xvd": "a virtual disk", "/dev/nvme": "NVMe", "/dev/": "a disk"}
"""Kinds of disks, by how their devices are called."""


class Scene(Protocol):
    """One workload, set up for one kind of leaves in one folder."""

    title: str
    nbytes: int
    repeats: int

    def prepare(self) -> None:
        """Write the files that cases read; called once, before the groups are run."""

    def close(self) -> None:
        """Remove every file."""

    def groups(self) -> tuple[Group, ...]:
        """The groups of cases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What treering wants to reach in one group on one workload."""

    row: int
    """Number of the row in the list of goals."""
    workload: str
    """Name of the workload."""
    group: str
    """Name of the group."""
    kind: Literal["faster", "times", "peak share", "peak bytes", "seconds", "count", "count over"]
    """At least so many times faster; at most so many times the time; peak as a share of the bytes; peak; time; at most
    so many of what the group counts; at most so many more of it than another case."""
    bound: float
    """The number to reach, in the unit that the kind says."""
    against: str | None = None
    """The case that we are compared with, which may be missing; None for peaks, seconds and counts."""
    leaves: LeafKind | None = None
    """The kind of leaves that it is about; None for every kind."""

    def met(self, value: float) -> bool:
        """Whether a measured value reaches the goal."""
        return value >= self.bound if self.kind == "faster" else value <= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One file's worth of scenes and goals."""

    name: str
    """What to call it on the command line."""
    title: str
    """What is compared."""
    workloads: tuple[str, ...]
    """Names of the workloads that it knows."""
    numpy_only: tuple[str, ...]
    """Those of them that are only run with numpy leaves."""
    jax_only: tuple[str, ...] = ()
    """Those of them that are only run with jax leaves."""
    meshes: tuple[str, ...] = ()
    """Those of them that need as many devices as ``workloads.DEVICES``."""
    packages: tuple[str, ...]
    """Distributions whose versions belong into the report."""
    scene: Callable[[str, LeafKind, float, Path], Scene]
    """Sets up (workload, leaves, size factor, folder)."""
    goals: tuple[Goal, ...]
    """What treering wants to reach."""

    def kinds(self, name: str, asked: Sequence[LeafKind]) -> tuple[LeafKind, ...]:
        """The kinds of leaves that a workload is run with."""
        if name in self.numpy_only:
            return ("numpy",)
        return ("jax",) if name in self.jax_only else tuple(asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to run, and how often."""

    rounds: int
    """Rounds of each group; short workloads take a multiple."""
    only: tuple[str, ...]
    """Names of workloads."""
    leaves: tuple[LeafKind, ...]
    """Kinds of leaves."""
    groups: tuple[str, ...]
    """Groups whose names begin with one of these; all when empty."""
    size: float
    """Factor on every workload's bytes."""
    folder: Path
    """Where files are written: the disk that is measured."""
    memory: bool
    """Whether peaks are measured."""
    command: str = ""
    """What was typed: it stands in the report, so that others can repeat the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All that was measured of one case."""

    case: str
    """Who did it."""
    limit: bool
    """Whether it is a limit of the machine."""
    seconds: tuple[float, ...]
    """Time of each round."""
    peak: memory.Peak | None
    """Its memory, if measured."""
    counts: tuple[float, ...] = ()
    """What it counted in each round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One group on one workload with one kind of leaves; the first outcome is ours."""

    workload: str
    """Name of the workload."""
    title: str
    """What the workload is."""
    nbytes: int
    """Bytes of its arrays."""
    leaves: LeafKind
    """Kind of leaves."""
    group: str
    """Name of the group."""
    outcomes: tuple[Outcome, ...]
    """One for each case."""
    unit: str | None = None
    """What was counted."""

    def against(self, name: str) -> Outcome:
        """The outcome of a case.

        Raises:
            KeyError: there is none.
        """
        for outcome in self.outcomes:
            if outcome.case == name:
                return outcome
        raise KeyError(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One goal on one kind of leaves, measured."""

    goal: Goal
    """The goal."""
    leaves: LeafKind
    """Kind of leaves."""
    value: Spread
    """Measured, in the goal's unit."""
    met: bool
    """Whether the median reaches the goal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything of one run."""

    benchmark: str
    """Name of the benchmark."""
    title: str
    """What was compared."""
    machine: dict[str, str]
    """When, where and by which command: date, system, processor, memory, load, file system, versions."""
    size: float
    """Factor on the workloads' bytes; the goals are about factor 1."""
    jobs: tuple[Job, ...]
    """What was measured."""
    verdicts: tuple[Verdict, ...]
    """The goals."""
    wrong: tuple[str, ...] = field(default=())
    """Results that were not what they should be: empty, or the figures are worth nothing."""


def load(name: str) -> Benchmark:
    """The benchmark in the file of this name."""
    found = importlib.import_module(f"benchmarks.{name}").BENCHMARK
    assert isinstance(found, Benchmark)  # a benchmark's file must define one
    return found


def _log(text: str) -> None:
    """Say on the error stream how far the run is."""
    print(text, file=sys.stderr, flush=True)


def _machine(benchmark: Benchmark, options: Options) -> dict[str, str]:
    """When and where this run takes place; neither the name of the host nor a path is in it."""
    import treering  # jax looks at the environment when it is imported

    versions = {"treering": treering.__version__, **{name: _version(name) for name in benchmark.packages}}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": options.command,
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "processor": _first_value(Path("/proc/cpuinfo"), "model name"),
        "cores": str(os.cpu_count()),
        "memory": _memory(),
        "load": " ".join(f"{value:.2f}" for value in os.getloadavg()),
        "file system": _file_system(options.folder),
        **versions,
    }


def _first_value(file: Path, name: str) -> str:
    """The first value of a name in a file of lines ``name: value``; 'unknown' where there is none."""
    lines = file.read_text().splitlines() if file.exists() else ()
    found = (value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == name)
    return next(found, "unknown")


def _memory() -> str:
    """The memory of the machine in GiB, as Linux says it."""
    kib = _first_value(Path("/proc/meminfo"), "MemTotal").split()[0]
    return f"{int(kib) / (1 << 20):.0f} GiB" if kib.isdecimal() else kib


def _version(package: str) -> str:
    """The version of a package, or that its rows are missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed: its rows are missing"


def _file_system(folder: Path) -> str:
    """Type of the file system of a folder and kind of its disk, as Linux lists it; 'unknown' elsewhere."""
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return "unknown"
    parents = {str(parent) for parent in (folder.resolve(), *folder.resolve().parents)}
    entries = [line.split()[:3] for line in mounts.read_text().splitlines()]
    fitting = [(len(point), kind, device) for device, point, kind in entries if point in parents]
    if not fitting:
        return "unknown"
    _, kind, device = max(fitting)
    disk = next((text for start, text in _DISKS.items() if device.startswith(start)), "")
    return f"{kind} on {disk}" if disk else kind


def run(benchmark: Benchmark, options: Options) -> Report:
    """Measure everything that the options ask for."""
    jobs: list[Job] = []
    wrong: list[str] = []
    machine = _machine(benchmark, options)
    for name in options.only:
        for leaves in benchmark.kinds(name, options.leaves):
            done, faults = _run_scene(benchmark, name, leaves, options)
            jobs.extend(done)
            wrong.extend(faults)
    return Report(
        benchmark=benchmark.name,
        title=benchmark.title,
        machine=machine,
        size=options.size,
        jobs=tuple(jobs),
        verdicts=tuple(_verdicts(benchmark.goals, jobs)),
        wrong=tuple(wrong),
    )


def _wanted(group: Group, options: Options) -> bool:
    """Whether the options ask for this group."""
    return not options.groups or group.name.startswith(options.groups)


def _warm_up(benchmark: Benchmark, name: str, leaves: LeafKind, options: Options) -> list[str]:
    """Run every case once on a small tree: imports, caches and pools are made before the clock runs."""
    scene = benchmark.scene(name, leaves, options.size * _WARM_UP, options.folder / "warm-up")
    scene.prepare()
    try:
        return [fault for group in scene.groups() if _wanted(group, options) for fault in interleave(group, 1).wrong]
    finally:
        scene.close()


def _run_scene(benchmark: Benchmark, name: str, leaves: LeafKind, options: Options) -> tuple[list[Job], list[str]]:
    """Time all groups of a scene, then measure the peaks, one process for each case."""
    wrong = _warm_up(benchmark, name, leaves, options)
    scene = benchmark.scene(name, leaves, options.size, options.folder)
    _log(f"{name}, {leaves} leaves: {scene.title}")
    scene.prepare()
    jobs = []
    try:
        groups = [group for group in scene.groups() if _wanted(group, options)]
        timed: list[Rounds] = []
        for group in groups:
            count = 1 if group.once else options.rounds * scene.repeats * group.repeats
            rounds = interleave(group, count, report=_log)
            timed.append(rounds)
            wrong.extend(rounds.wrong)
            if group.between is not None:
                group.between()
        title, nbytes = scene.title, scene.nbytes
        for group, rounds in zip(groups, timed, strict=True):
            peaks, faults = _peaks(benchmark, name, leaves, group, options)
            wrong.extend(faults)
            jobs.append(
                Job(
                    workload=name,
                    title=title,
                    nbytes=nbytes,
                    leaves=leaves,
                    group=group.name,
                    outcomes=_outcomes(group, rounds, peaks),
                    unit=group.unit,
                )
            )
    finally:
        scene.close()
    return jobs, wrong


def _outcomes(group: Group, rounds: Rounds, peaks: dict[str, memory.Peak]) -> tuple[Outcome, ...]:
    """What was measured of each case."""
    return tuple(
        Outcome(
            case=case.name,
            limit=case.limit,
            seconds=tuple(rounds.seconds[case.name]),
            peak=peaks.get(case.name),
            counts=tuple(rounds.counts[case.name]),
        )
        for case in group.cases
    )


def _peaks(
    benchmark: Benchmark, name: str, leaves: LeafKind, group: Group, options: Options
) -> tuple[dict[str, memory.Peak], list[str]]:
    """Peak memory of every case that is no limit, by name, and what was wrong."""
    peaks: dict[str, memory.Peak] = {}
    wrong: list[str] = []
    if not (options.memory and group.peaks and memory.available()):
        return peaks, wrong
    for case in group.cases:
        if case.limit:
            continue
        command = [sys.executable, "-m", "benchmarks", benchmark.name, "--peak-of", group.name, case.name]
        command += ["--only", name, "--leaves", leaves, "--size", repr(options.size), "--dir", str(options.folder)]
        peaks[case.name], fault = memory.ask(command)
        _log(f"{group.name}, {case.name}: peak extra {peaks[case.name].extra / (1 << 20):.1f} MiB")
        if fault is not None:
            wrong.append(f"{group.name}, {case.name}, memory: {fault}")
    return peaks, wrong


def serve_peak(benchmark: Benchmark, group: str, case: str, options: Options) -> None:
    """The other end of ``_peaks``: set the scene up again and run one case under watch."""
    scene = benchmark.scene(options.only[0], options.leaves[0], options.size, options.folder)
    for each in scene.groups():
        if each.name == group:
            memory.serve(each.case(case))
            if each.between is not None:
                each.between()


def _verdicts(goals: Sequence[Goal], jobs: Sequence[Job]) -> list[Verdict]:
    """Every goal that the jobs have figures for."""
    verdicts = []
    for goal in goals:
        for job in jobs:
            if (goal.workload, goal.group) == (job.workload, job.group) and goal.leaves in (None, job.leaves):
                value = _value(goal, job)
                if value is not None:
                    verdicts.append(Verdict(goal=goal, leaves=job.leaves, value=value, met=goal.met(value.median)))
    return verdicts


def _value(goal: Goal, job: Job) -> Spread | None:
    """What was measured, in the goal's unit; None if it was not."""
    us = job.outcomes[0]
    match goal.kind:
        case "seconds":
            return spread(us.seconds)
        case "peak share":
            return None if us.peak is None else spread([us.peak.extra / job.nbytes])
        case "peak bytes":
            return None if us.peak is None else spread([us.peak.extra])
        case "count":
            return spread(us.counts) if us.counts else None
    assert goal.against is not None  # the other kinds compare
    if goal.against not in {outcome.case for outcome in job.outcomes}:
        return None
    other = job.against(goal.against)
    if goal.kind == "count over":
        return spread([mine - its for mine, its in zip(us.counts, other.counts, strict=True)])
    return ratio(other.seconds, us.seconds) if goal.kind == "faster" else ratio(us.seconds, other.seconds)
