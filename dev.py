#!/usr/bin/env python3
"""Set treering up in a folder of its own and run it.

    python3 dev.py demo     what treering does, in half a minute
    python3 dev.py demo-bucket  the same in a bucket of a real server, in less than a minute
    python3 dev.py test     the tests; with ``-m bucket`` those on real servers of objects
    python3 dev.py lint     ruff, mypy, import-linter
    python3 dev.py docs     build the pages and run their examples
    python3 dev.py browser  the pages and the reports in a real headless Chromium, which the system must have
    python3 dev.py referee  the tests against the real eformer, Orbax, jax, on Python 3.11 transformers and PyTorch,
                            in an environment of its own (.venv-referee)
    python3 dev.py recipes  docs/guides/recipes.md with the real MLflow, W&B, trackio, huggingface_hub and
                            model-signing, in an environment of its own (.venv-recipes)
    python3 dev.py fuzz     damaged and hostile input: python -m torture fuzz
    python3 dev.py bench    the numbers: python -m benchmarks
    python3 dev.py pin      write constraints.txt anew: dev.py pin python3.11 python3.13

What dev.py does not know goes to the tool (``python3 dev.py test -k gzip``), and so does all after ``--``.

The folder is ``.venv``, or the one that ``--venv`` names. It is made once, with just what the verb needs;
other verbs, and changes to ``pyproject.toml`` or ``constraints.txt``, bring it up to date; a half-made one
is made again. The Python that runs this file is never changed.
"""

# Only names that Python 3.7 knows may stand outside the functions: an old Python shall get to say its line.
from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

OLDEST = (3, 11)
ROOT = Path(__file__).resolve().parent
CONSTRAINTS = ROOT / "constraints.txt"
STAMP = "treering-dev.json"
BUILD_TOOLS = ("hatchling", "hatch-fancy-pypi-readme", "editables")
EXTRAS = {
    "demo": ("demo",),
    "demo-bucket": ("demo", "test"),
    "test": ("test",),
    "lint": ("lint", "test"),
    "docs": ("docs", "test"),
    "browser": ("browser", "docs", "test"),
    "referee": ("referee", "test"),
    "recipes": ("recipes", "test"),
    "fuzz": ("test",),
    "bench": ("test",),
    "pin": (),
}
HEAVY = ("referee", "recipes")
REFEREES = ("tests/compat/eformer", "tests/compat/jax_pytree", "tests/compat/orbax", "tests/compat/huggingface")
IN_BUCKETS = ("tests/checkpoint", "tests/run", "tests/leaves")


class Stop(Exception):
    """Something is missing or went wrong; the message is the one line that is shown."""


def main(argv: list[str]) -> int:
    """Run the verb in ``argv``; return the exit status of its tool, 2 when the tool could not be started."""
    try:
        check_python()
        options, theirs = parse(argv)
        if options.verb == "pin":
            return pin(theirs or [sys.executable])
        # eformer and the trackers are so heavy that only what needs them gets an environment with them.
        verb = "referee" if options.verb == "bench" and "leaves" in theirs else options.verb
        home = Path(options.venv or ROOT / (f".venv-{verb}" if verb in HEAVY else ".venv")).resolve()
        ready(home, EXTRAS[verb])
        return run(commands(options.verb, home, theirs), home)
    except Stop as stop:
        print(f"dev.py: {stop}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dev.py: interrupted; the same command goes on from here", file=sys.stderr)
        return 130


def check_python() -> None:
    """Stop on a Python that is too old, and name one that would do."""
    if sys.version_info >= OLDEST:
        return
    wanted, found = (".".join(map(str, version)) for version in (OLDEST, sys.version_info[:3]))
    names = [f"python3.{minor}" for minor in range(15, OLDEST[1] - 1, -1)]
    newer = next((name for name in names if shutil.which(name) and works(name)), None)
    hint = f"try: {newer} {' '.join(sys.argv)}" if newer else "install a newer one, then run this again with it"
    raise Stop(f"treering needs Python {wanted} or newer, and this is {found}; {hint}")


def works(python: str) -> bool:
    """Whether the command runs; a pyenv shim on PATH may name a version that is not selected."""
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Read our own arguments, a verb and ``--venv``; return them and what is left for the tool."""
    parser = argparse.ArgumentParser(
        prog="dev.py",
        usage="python3 dev.py VERB [--venv DIR] [arguments of the tool]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("verb", choices=list(EXTRAS), metavar="VERB", help=", ".join(EXTRAS))
    parser.add_argument("--venv", metavar="DIR", help="use this folder instead of .venv")
    cut = argv.index("--") if "--" in argv else len(argv)
    options, theirs = parser.parse_known_args(argv[:cut])
    return options, theirs + argv[cut + 1 :]


# ------------------------------------------------------------------------------------------------------ the environment


def ready(home: Path, extras: tuple[str, ...]) -> None:
    """Make ``home`` hold treering and ``extras``. Milliseconds when it does already."""
    wanted = fingerprint(home)
    stamp = read_stamp(home)
    same_python = stamp.get("python") == wanted["python"] and python_of(home).exists()
    if same_python and stamp.get("project") == wanted["project"] and set(extras) <= set(stamp["extras"]):
        return
    start = time.monotonic()
    if not same_python:
        create(home)
        stamp = {}
    together = sorted({*extras, *stamp.get("extras", ())})
    say(f"installing treering{with_extras(together)} into {shown(home)}; this takes a minute or two, once")
    write_stamp(home, {})  # Until pip is through, the folder counts as half-made.
    install(home, together)
    write_stamp(home, {**wanted, "extras": together})
    say(f"ready after {time.monotonic() - start:.0f} s")


def fingerprint(home: Path) -> dict[str, str]:
    """Say what an environment depends on: the Python and place, and the project's requirements."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wants = json.dumps([project["build-system"], project["project"]], sort_keys=True)
    pins = CONSTRAINTS.read_text(encoding="utf-8")
    return {
        "python": digest(sys.version, sys.base_prefix, str(home), str(ROOT)),
        "project": digest(wants, pins, *BUILD_TOOLS),
    }


def digest(*texts: str) -> str:
    """Name a few texts by one short hash."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]


def read_stamp(home: Path) -> dict[str, Any]:
    """Return what was noted when ``home`` was last finished; empty when it never was."""
    try:
        stamp = json.loads((home / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(home: Path, stamp: dict[str, Any]) -> None:
    """Replace the stamp in one step, so that an interrupted run leaves the old one or the new one."""
    aside = home / (STAMP + ".new")
    aside.write_text(json.dumps(stamp), encoding="utf-8")
    aside.replace(home / STAMP)


def create(home: Path) -> None:
    """Make an empty environment at ``home``, in place of an unfinished or outdated one of ours."""
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            name = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
            raise Stop(f"this Python comes without its module {module}; on Debian and Ubuntu: apt install {name}")
    import venv

    try:
        if home.is_dir() and any(home.iterdir()):
            if not (home / STAMP).exists():
                raise Stop(f"{shown(home)} was not made by dev.py; remove it or name another --venv")
            shutil.rmtree(home)
        home.mkdir(parents=True, exist_ok=True)
        write_stamp(home, {})
        say(f"making {shown(home)} with Python {sys.version.split()[0]}")
        venv.EnvBuilder(with_pip=True, symlinks=os.name != "nt").create(home)
    except OSError as error:
        raise Stop(f"could not make {shown(home)}: {error}") from error
    except subprocess.CalledProcessError as error:
        raise Stop(f"could not put pip into {shown(home)}: {' '.join(map(str, error.cmd))} failed") from error


def install(home: Path, extras: list[str]) -> None:
    """Install the build tools, then the project in place, both at the pinned versions."""
    pip(home, *BUILD_TOOLS)
    pip(home, "--no-build-isolation", "--editable", str(ROOT) + with_extras(extras))


def pip(home: Path, *what: str, pinned: bool = True) -> None:
    """Run ``pip install``; on a terminal its present line shows, and its last lines when it fails."""
    # -I and PIP_USER=0: settings for the system's Python do not reach in here.
    # --no-compile: Python compiles what is really imported, the first time; that is a small part.
    options = ["--disable-pip-version-check", "--no-compile"]
    command = [str(python_of(home)), "-I", "-m", "pip", "install", *options, *what]
    if pinned:
        command += ["--constraint", str(CONSTRAINTS)]
    last: list[str] = []
    width = shutil.get_terminal_size().columns - 1
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "PIP_USER": "0"}
    ) as process:
        for line in process.stdout or ():
            last = [*last[-14:], line.rstrip()]
            if sys.stdout.isatty():
                print("\r\033[K" + f"  {line.strip()}"[:width], end="", flush=True)
    if sys.stdout.isatty():
        print("\r\033[K", end="", flush=True)
    if process.returncode != 0:
        print("\n".join(last), file=sys.stderr)
        raise Stop("pip could not install the above; is there a network? The same command tries again")


def python_of(home: Path) -> Path:
    """Return the environment's interpreter."""
    return home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def with_extras(extras: list[str]) -> str:
    """Write extras as pip reads them: ``[docs,test]``, or nothing."""
    return f"[{','.join(extras)}]" if extras else ""


def shown(home: Path) -> str:
    """Write a folder relative to here where that is shorter."""
    return min(os.path.relpath(home), str(home), key=len)


def say(message: str) -> None:
    """Tell the person what goes on, at once."""
    print(f"dev.py: {message}", flush=True)


# ------------------------------------------------------------------------------------------------------------ the verbs


def commands(verb: str, home: Path, theirs: list[str]) -> list[list[str]]:
    """List the commands of a verb, in order."""
    python = [str(python_of(home)), "-m"]
    # One more than there are cores: tests wait for the disk, for processes and for the end of a timeout.
    workers = str(min(4, (os.cpu_count() or 1) + 1))
    test = [*python, "pytest", "-n", workers, "--dist", "worksteal"]
    referees = () if any(each.startswith("tests/") for each in theirs) else REFEREES
    # What is for buckets alone, and the tests of everything that works in a bucket as well.
    on_buckets = [test + theirs, [*test, *IN_BUCKETS, "--store", "seaweed"]]
    return {
        "demo": [[*python, "demo", *theirs]],
        "demo-bucket": [[*python, "demo.bucket", *theirs]],
        "test": on_buckets if theirs == ["-m", "bucket"] else [test + theirs],
        "lint": [
            [*python, "ruff", "check", "."],
            [*python, "ruff", "format", "--check", "."],
            [*python, "mypy"],
            [str(python_of(home).with_name("lint-imports"))],
        ],
        "docs": [
            [*python, "sphinx", "-W", "-n", "-q", "--keep-going", "-b", "html", "docs", "docs/_build/html"],
            # All pages and docstrings; a run of all tests takes a few of them.
            [*test, "-m", "not recipes", "tests/docs", *theirs],
        ],
        "browser": [
            [*python, "sphinx", "-W", "-n", "-q", "--keep-going", "-b", "html", "docs", "docs/_build/html"],
            [*python, "pytest", "-n", "2", "-m", "browser", "tests/browser", *theirs],
        ],
        "referee": [[*python, "pytest", "-m", "not benchmark", *referees, *theirs]],
        "recipes": [[*test, "-m", "recipes", "tests/docs/test_recipes.py", *theirs]],
        "fuzz": [[*python, "torture", "fuzz", *theirs]],
        "bench": [[*python, "benchmarks", *theirs]],
    }[verb]


def run(steps: list[list[str]], home: Path) -> int:
    """Run the commands from the root of the project; all of them, even when one fails."""
    scripts = str(python_of(home).parent)
    env = {**os.environ, "VIRTUAL_ENV": str(home), "PATH": os.pathsep.join([scripts, os.environ.get("PATH", "")])}
    # A path of another checkout would be tested in place of this one. Where nothing that was compiled is kept, each of
    # the many processes that tests start compiles treering again, and each run the tests.
    for name in ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE"):
        env.pop(name, None)
    os.chdir(ROOT)
    if len(steps) == 1 and os.name != "nt":
        sys.stdout.flush()
        os.execve(steps[0][0], steps[0], env)  # noqa: S606 - no shell between the terminal and the tool
    failed = []
    for step in steps:
        name = " ".join([Path(step[0]).name, *step[1:]]).replace("python -m ", "")
        say(name)
        if subprocess.run(step, env=env, check=False).returncode != 0:
            failed.append(name)
    for name in failed:
        print(f"dev.py: failed: {name}", file=sys.stderr)
    return 1 if failed else 0


def pin(pythons: list[str]) -> int:
    """Resolve everything anew on each of ``pythons`` and write ``constraints.txt``."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wants = project["dependencies"] + [need for extra in project["optional-dependencies"].values() for need in extra]
    frozen: dict[str, dict[str, str]] = {}
    for python in pythons:
        version = output(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder, "venv")
            say(f"resolving for Python {version}")
            output(python, "-m", "venv", str(home))
            pip(home, *BUILD_TOOLS, *wants, pinned=False)
            lines = output(str(python_of(home)), "-m", "pip", "freeze").splitlines()
        # The "+cpu" of a build is not part of the version that others can install.
        frozen[version] = dict(line.partition("+")[0].split("==") for line in lines)
    head = CONSTRAINTS.read_text(encoding="utf-8").splitlines() if CONSTRAINTS.exists() else []
    comments = [line for line in head if line.startswith("#")]
    CONSTRAINTS.write_text("\n".join([*comments, *merged(frozen), ""]), encoding="utf-8")
    return 0


def output(*command: str) -> str:
    """Run a command and return what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Stop(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def merged(frozen: dict[str, dict[str, str]]) -> list[str]:
    """Write one line a package, or one for each run of Python versions that differ, told apart by markers."""
    pythons = sorted(frozen, key=lambda version: [int(part) for part in version.split(".")])
    lines = []
    for name in sorted({name for pins in frozen.values() for name in pins}, key=str.casefold):
        versions = [frozen[python].get(name) for python in pythons]
        starts = [i for i, version in enumerate(versions) if i == 0 or version != versions[i - 1]]
        for start, end in zip(starts, [*starts[1:], len(versions)], strict=True):
            bounds = [f'python_version >= "{pythons[start]}"'] if start else []
            bounds += [f'python_version < "{pythons[end]}"'] if end < len(versions) else []
            marker = f"; {' and '.join(bounds)}" if bounds else ""
            if versions[start] is not None:
                lines.append(f"{name}=={versions[start]}{marker}")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
