"""One process of a job under attack: joins the job, waits at the point that it is told, saves or loads."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax

from torture.ports import free_port
from torture.process_points import Point, install
from torture.process_scenes import JointScene
from treering._arrays import host, outgoing
from treering._coordination import job_handshake
from treering._coordination.allgather import allgather_in_order
from treering._coordination.operations import Call
from treering._values.processes import Processes

__all__ = ["ACTIONS", "LAYERS", "Action", "Layer", "Worker", "armed", "forge", "joined", "loading", "saving"]

Action = Literal["kill", "pause", "outlive", "slow", "pass"]
Layer = Literal["forged", "jax"]
"""A real job of jax's; or processes of which each has all devices, and is told which of them are its own. Those have no
process without which jax ends the others."""

LAYERS: tuple[Layer, ...] = ("forged", "jax")
ACTIONS: tuple[Action, ...] = ("kill", "pause", "outlive", "slow")
"""What strikes a process at a point. "outlive" is a pause in which another job saves."""


def joined(layer: Layer, count: int) -> str:
    """Return the command that makes a job of the processes."""
    return json.dumps({"do": "join", "layer": layer, "port": free_port(), "job": secrets.token_hex(8), "count": count})


def armed(points: list[Point], action: Action, slow: float) -> str:
    """Return the command that lets a process stop at its next coming by."""
    return json.dumps(
        {"do": "arm", "points": [dataclasses.asdict(point) for point in points], "action": action, "slow": slow}
    )


def saving(version: int, *, old: bool, timeout: float) -> str:
    """Return the command to save a version."""
    return json.dumps({"do": "save", "version": version, "old": old, "timeout": timeout})


def loading(version: int, *, timeout: float) -> str:
    """Return the command to load, and to expect a version."""
    return json.dumps({"do": "load", "version": version, "timeout": timeout})


@dataclasses.dataclass(slots=True)
class Worker:
    """What a process of a job does; one for each process, since processes are forked."""

    scene: JointScene
    """What is saved or loaded."""
    path: Path
    """Where."""

    def __call__(self, number: int, command: str, tell: Callable[[str], None]) -> str | None:
        """Do what is asked."""
        asked: dict[str, Any] = json.loads(command)
        match asked["do"]:
            case "join":
                if asked["layer"] == "jax":
                    jax.config.update("jax_num_cpu_devices", 2)
                    jax.distributed.initialize(f"127.0.0.1:{asked['port']}", asked["count"], number)
                else:
                    forge(Processes(this=number, count=asked["count"]), asked["job"])
                jax.devices()
                if asked["layer"] == "jax":
                    # Processes find each other, and programs are compiled, at leisure.
                    allgather_in_order(b"", Processes(this=number, count=asked["count"]), "begin")
            case "arm":
                for point in asked["points"]:
                    _arm(Point(**point), asked["action"], asked["slow"], tell)
            case "load":
                self.scene.load(self.path, asked["version"], timeout=asked["timeout"])
            case _:
                self.scene.save(self.path, asked["version"], old=asked["old"], timeout=asked["timeout"])
        return None


def forge(processes: Processes, job: str) -> None:
    """Make this process one of a job that jax knows nothing of."""
    jax.config.update("jax_num_cpu_devices", 2 * processes.count)
    last = 0

    def next_sequence(path: Path, asking: Processes, *, timeout: float, doing: str) -> Call:  # noqa: ARG001 - its callers'
        nonlocal last
        last += 1
        return Call(job=job, number=last, processes=asking, timeout=timeout, doing=doing)

    _stand_in(outgoing.process_of, lambda device: device.id // 2)
    _stand_in(host.this_processes, lambda leaves: processes)  # noqa: ARG005 - as it is called
    _stand_in(job_handshake.next_sequence, next_sequence)


def _stand_in(function: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Put another function in the place of one, wherever treering looks it up."""
    for name, module in list(sys.modules.items()):
        if name.startswith("treering.") and getattr(module, function.__name__, None) is function:
            setattr(module, function.__name__, other)


def _arm(point: Point, action: Action, slow: float, tell: Callable[[str], None]) -> None:
    struck = False

    def act() -> None:
        nonlocal struck
        if struck:
            return
        struck = True
        tell(point.name)
        match action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "pause" | "outlive":
                # To this thread: of a signal to the process another thread may be told, while this one goes on.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            case "slow":
                time.sleep(slow)
            case _:
                pass

    install(point, act)
