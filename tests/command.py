"""The command line as a user starts it, in a process of its own, and the same in this one."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from treering.__main__ import main
from treering._runs.copy_run import copy_path

__all__ = ["HEAVY", "copy_path", "ended", "here", "imported_by", "inside", "treering"]

# What a verb that shows headers alone does without.
HEAVY = {"jax", "jaxlib", "numpy", "ml_dtypes", "rich", "tensorstore", "zstandard", "treering._arrays"}


def treering(
    *arguments: str, code: int | None = None, timeout: float = 60, module: str = "treering", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m treering``, or another module; assert an exit code where one is given, and no traceback."""
    clean = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "FORCE_COLOR", "XLA_FLAGS"}}
    command: Sequence[str] = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command,
        env=clean | {"PYTHONIOENCODING": "utf-8"} | environment,
        capture_output=True,
        text=True,
        encoding=environment.get("PYTHONIOENCODING", "utf-8"),
        timeout=timeout,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    if code is not None:
        assert done.returncode == code, done.stdout + done.stderr
    return done


def ended(*arguments: object) -> int | str | None:
    """Run a verb in this process, with the streams that it has; return the exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["treering", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
    return end.value.code


def inside(*arguments: str, code: int) -> tuple[str, str]:
    """Run a verb in this process, which takes no time to start; assert its exit code, return stdout and stderr."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        end = ended(*arguments)
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.detach().getvalue().decode())
    assert end == code, texts
    return texts[0], texts[1]


def here(*arguments: str, code: int) -> subprocess.CompletedProcess[str]:
    """Do as `treering` does, but in this process: for the many cases of verbs whose start is tested elsewhere."""
    out, err = inside(*arguments, code=code)
    return subprocess.CompletedProcess(arguments, code, out, err)


def imported_by(*arguments: str) -> set[str]:
    """Run a verb in a process of its own and return what it imported."""
    command = """
import sys
from treering.__main__ import main
try:
    main()
except SystemExit as end:
    print()
    print(end.code or 0, *sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", command, *arguments], capture_output=True, text=True, check=True)
    code, *modules = done.stdout.splitlines()[-1].split()
    assert code == "0", done.stderr
    return set(modules)
