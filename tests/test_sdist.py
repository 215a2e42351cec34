"""What is published: an index takes it, and the source distribution holds what its own tests and pages need."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import treering as tr

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([\w./-]+)(?:#[\w-]*)?\)")
CHOSEN = ("tests/docs/test_architecture.py", "tests/leaves/folder/test_leaves_folder.py", "tests/crash/test_flushes.py")


def run(*command: str, at: Path, path: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    environment |= {"PYTHONPATH": "" if path is None else str(path), "PIP_NO_INDEX": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=at, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source distribution, and from it the wheel, as whoever publishes them does."""
    folder = tmp_path_factory.mktemp("published")
    run("build", "--no-isolation", "--outdir", str(folder), at=ROOT)
    return folder


def test_an_index_takes_them(published: Path) -> None:
    both = sorted(str(each) for each in published.iterdir())
    assert len(both) == 2
    assert run("twine", "check", "--strict", *both, at=published).count("PASSED") == 2


def test_the_wheel_is_small_and_has_nothing_but_the_package(published: Path) -> None:
    (wheel,) = published.glob("treering-*.whl")
    assert wheel.stat().st_size < 1_000_000
    with zipfile.ZipFile(wheel) as file:
        names = {name.split("/")[0] for name in file.namelist()}
        assert "treering/py.typed" in file.namelist()
    assert names == {"treering", f"treering-{tr.__version__}.dist-info"}


def test_what_an_index_shows_is_readable_without_the_repository(published: Path) -> None:
    (wheel,) = published.glob("treering-*.whl")
    with zipfile.ZipFile(wheel) as file:
        shown = message_from_bytes(file.read(f"treering-{tr.__version__}.dist-info/METADATA"))
    text = str(shown.get_payload())
    assert text.startswith("# treering")
    assert "## How fast" in text
    assert LINK.findall(text) == []  # they would lead nowhere
    assert "<!--" not in text
    assert {"cloud", "convert", "all"} <= set(shown.get_all("Provides-Extra", []))
    optional = [
        need for need in shown.get_all("Requires-Dist", []) if re.search(r"extra == '(cloud|convert|all)'", need)
    ]
    assert {need.partition(">")[0] for need in optional} == {"obstore"}


@pytest.fixture(scope="module")
def unpacked(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    (archive,) = published.glob("treering-*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def test_every_link_of_its_pages_leads_to_a_file_in_it(unpacked: Path) -> None:
    pages = [*unpacked.glob("*.md"), *unpacked.glob("docs/**/*.md"), *unpacked.glob("benchmarks/*.md")]
    links = [(page, link) for page in pages for link in LINK.findall(page.read_text(encoding="utf-8"))]
    assert len(links) > 60
    assert [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()] == []


def test_it_installs_and_its_tests_run(unpacked: Path, tmp_path: Path) -> None:
    run("pip", "install", "--no-deps", "--no-build-isolation", "-q", "--target", str(tmp_path), ".", at=unpacked)
    # Not the sources of the project: what was installed.
    where = "import treering; print(treering.__file__)"
    assert str(tmp_path) in subprocess.run(
        [sys.executable, "-c", where], env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
        check=True, cwd=tmp_path,
    ).stdout  # fmt: skip
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    run("pytest", *options, "--collect-only", "-m", "", "tests", at=unpacked, path=tmp_path)
    assert " passed" in run("pytest", *options, *CHOSEN, at=unpacked, path=tmp_path)
    for tool in ("demo", "torture", "benchmarks"):
        run(tool, "--help", at=unpacked, path=tmp_path)
