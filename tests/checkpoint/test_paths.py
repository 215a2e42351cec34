"""Paths that cannot be, at every public function that takes one: our errors, with the path, and nothing made."""

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering as tr
from tests import faults
from tests.command import copy_path, inside
from treering import leaves, serialization, sharding
from treering.errors import NotFoundError, StoreError, TreeringError, UnsupportedError

TREE = {"x": np.ones(3, np.float32)}
WRITE: dict[str, Callable[[str], Any]] = {
    "save": lambda path: tr.save(path, TREE),
    "save, one file": lambda path: tr.save(f"{path}.msgpack", TREE),
    "save, safetensors": lambda path: tr.save(f"{path}.safetensors", TREE),
    "save_async": lambda path: tr.save_async(path, TREE).result(),
    "save_async, one file": lambda path: tr.save_async(f"{path}.msgpack", TREE).result(),
    "Run.save": lambda path: tr.Run(path).save(1, TREE),
    "Run.load_or_init": lambda path: (tr.Run(path).load_or_init(lambda: TREE), tr.Run(path).save(1, TREE)),
    "tree_serialize_leaves": lambda path: leaves.tree_serialize_leaves(path, TREE),
    "save_to_file": lambda path: serialization.save_to_file(TREE, path),
}
READ: dict[str, Callable[[str], Any]] = {
    "load": tr.load,
    "load, like": lambda path: tr.load(path, like=TREE),
    "open": lambda path: tr.open(path).close(),
    "verify": tr.verify,
    "inspect": tr.inspect,
    "diff": lambda path: tr.diff(path, path),
    "Run.steps": lambda path: tr.Run(path).steps() or tr.load(path),
    "Run.latest": lambda path: tr.Run(path).latest() or tr.load(path),
    "Run.best": lambda path: tr.Run(path).best("loss") or tr.load(path),
    "Run.metrics": lambda path: tr.Run(path).metrics(1),
    "Run.load": lambda path: tr.Run(path).load(),
    "Run.gc": lambda path: tr.Run(path).gc() or tr.load(path),
    "Run.branch": lambda path: tr.Run(path).branch(1, f"{path} other"),
    "tree_deserialize_leaves": leaves.tree_deserialize_leaves,
    "index_leaves": leaves.index_leaves,
    "create_sharding_tree_from_index": lambda path: sharding.create_sharding_tree_from_index(path, None),
    "load_from_file": lambda path: serialization.load_from_file(TREE, path),
}
CALLS = WRITE | READ


FOUND_BY = {
    "save": ["load", "load, like", "open", "verify", "inspect", "diff"],
    "save_async": ["load"],
    "Run.save": ["Run.steps", "Run.latest", "Run.metrics", "Run.load", "Run.gc", "load", "verify", "inspect"],
    "Run.load_or_init": ["Run.load"],
    "tree_serialize_leaves": ["tree_deserialize_leaves", "index_leaves", "load", "verify"],
    "save_to_file": ["load_from_file"],
}


class PathOfBytes:
    """As an entry of ``os.scandir(b".")``."""

    def __fspath__(self) -> bytes:
        return b"bytes"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.sampled(7)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("path", ["a\0b", "a\ud800b", "n" * 300, "/".join(["n" * 100] * 60)])
def test_a_path_that_cannot_be(place: Path, call: str, path: str) -> None:
    with pytest.raises(TreeringError) as caught:
        CALLS[call](path)
    assert repr(path)[1:-1] in str(caught.value)
    assert not list(place.iterdir())


@pytest.mark.sampled(7)
@pytest.mark.parametrize("call", [call for call in CALLS if "one file" not in call and "safetensors" not in call])
@pytest.mark.parametrize("path", ["", 3, b"bytes", None, PathOfBytes()])
def test_what_is_no_path(place: Path, call: str, path: Any) -> None:
    with pytest.raises(TreeringError):
        CALLS[call](path)
    assert not list(place.iterdir())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("call", CALLS)
def test_a_current_folder_that_is_gone(place: Path, call: str) -> None:
    gone = place / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    with pytest.raises((NotFoundError, StoreError), match="'x"):
        CALLS[call]("x")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("call", WRITE)
@pytest.mark.parametrize("path", ["~/x", "~someone/x", "~"])
def test_nothing_is_made_below_a_folder_called_tilde(place: Path, call: str, path: str) -> None:
    with pytest.raises(UnsupportedError, match=r"'~' is not expanded here; os\.path\.expanduser does it"):
        WRITE[call](path)
    assert not list(place.iterdir())


def test_a_tilde_elsewhere_is_a_name(place: Path) -> None:
    tr.save("x/~", TREE)
    tr.save(place / "~", TREE)
    assert tr.load("x/~").keys() == tr.load(place / "~").keys() == TREE.keys()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("call", READ)
@pytest.mark.parametrize("reason", [errno.EIO, errno.ESTALE])
def test_the_first_look_at_the_path_fails(place: Path, monkeypatch: pytest.MonkeyPatch, call: str, reason: int) -> None:
    with tr.Run("x") as run:
        run.save(1, TREE)
    left = [None]

    def is_first(path: Any, *_: Any, **__: Any) -> bool:
        there = not isinstance(path, int) and os.fspath(path) in ("x", str(place / "x"))
        return there and bool(left) and left.pop() is None

    for name in ("stat", "lstat"):
        faults.fail(monkeypatch, os, name, OSError(reason, os.strerror(reason), str(place / "x")), when=is_first)
    error: TreeringError | None = None
    try:
        CALLS[call]("x")
    except TreeringError as raised:
        error = raised
    # It is told as what it is, or a second look was as good.
    assert error is None or left or os.strerror(reason) in str(error) or "Is a directory" not in str(error)


@contextlib.contextmanager
def without_privilege() -> Iterator[Path]:
    """Be somebody whom rights of files bind, in a folder of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            yield folder / "x"
        finally:
            if root:
                os.seteuid(0)


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="the system has no users")
def test_a_save_under_a_umask_that_leaves_no_rights_is_no_end_of_saving() -> None:
    with without_privilege() as path:
        leaves.tree_serialize_leaves(path, TREE)
        old = os.umask(0o777)
        try:
            with pytest.raises(StoreError, match="Permission denied"):
                leaves.tree_serialize_leaves(path, TREE)
        finally:
            os.umask(old)
        attempts = list((path / ".treering").iterdir())
        assert len(attempts) == 1, "what failed is gone"
        # One that was left by an older version.
        (path / ".treering" / "0123456789abcdef").mkdir(mode=0)
        assert not stat.S_IMODE((path / ".treering" / "0123456789abcdef").stat().st_mode)
        leaves.index_leaves(path)
        assert not (path / ".treering" / "0123456789abcdef").exists()
        (path / ".treering" / "0123456789abcdef").mkdir(mode=0)
        leaves.tree_serialize_leaves(path, TREE)
        assert not (path / ".treering" / "0123456789abcdef").exists()


def test_what_is_left_out_of_a_long_key_is_counted() -> None:
    long = str(TreeringError("no", path=("a" * 1000,)))
    assert long == f"no (at leaf '{'a' * 200}[700 characters left out]{'a' * 100}')"
    many = str(TreeringError("no", path=("a",) * 1000))
    assert "a/a/[984 keys left out]/a/a" in many


INTO: dict[str, Callable[[str, str], Any]] = {
    "branch": lambda source, target: tr.Run(source).branch(1, target),
    "convert": lambda source, target: tr.convert(source, target, overwrite=True),
    "convert to weights": lambda source, target: tr.convert(f"{source}/step_00000001", target, to="hf", lose="**"),
    "convert to leaves": lambda source, target: tr.convert(f"{source}/step_00000001", target, to="leaves"),
    "cp": lambda source, target: copy_path(source, target, overwrite=True),
    "cp of a step": lambda source, target: copy_path(f"{source}/step_00000001", target, overwrite=True),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("target", ["run/step_00000001/new", "other/../run/step_00000001/new", "link/new"])
@pytest.mark.parametrize("into", INTO)
def test_nothing_is_written_into_its_own_source(place: Path, into: str, target: str) -> None:
    with tr.Run("run") as run:
        run.save(1, TREE)
    (place / "other").mkdir()
    (place / "link").symlink_to("run/step_00000001")
    before = sorted(place.rglob("*"))
    with pytest.raises(UnsupportedError, match="is, or lies in, the source; choose another path"):
        INTO[into]("run", target)
    assert sorted(place.rglob("*")) == before


def test_a_run_is_not_copied_onto_itself(place: Path) -> None:
    with tr.Run("run") as run:
        run.save(1, TREE)
    for target in ("run", "./run/", str(place / "run")):
        with pytest.raises(UnsupportedError, match="is, or lies in, the source"):
            copy_path("run", target, overwrite=True)
        with pytest.raises(UnsupportedError, match="is, or lies in, the source"):
            tr.convert("run", target, overwrite=True)


@pytest.mark.parametrize("path", ["/", "//", "/.", "/usr/..", "file:///"])
def test_the_root_of_the_file_system_is_no_target(place: Path, path: str) -> None:
    tr.save("checkpoint", TREE)
    told = r"is the root of the file system; pass the path of a folder in it"
    for writes in (
        lambda: tr.save(path, TREE),
        lambda: tr.Run(path),  # before anything is written: `branch` makes one of its target
        lambda: tr.convert("checkpoint", path),
        lambda: leaves.tree_serialize_leaves(path, TREE),
    ):
        with pytest.raises(UnsupportedError, match=told):
            writes()
    assert "is the root of the file system" in inside("cp", "checkpoint", path, code=2)[1]
    assert [entry.name for entry in place.iterdir()] == ["checkpoint"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("write", FOUND_BY)
@pytest.mark.parametrize("path", ["missing/../x", "a/b/../../x", "abc:", "./abc:", "s3:", "./s3:", "a/gs:"])
def test_what_was_saved_is_found_by_the_same_text(place: Path, write: str, path: str) -> None:
    try:
        WRITE[write](path)
    except UnsupportedError:
        assert path == "s3:"
        assert not list(place.iterdir())
        return
    for read in FOUND_BY[write]:
        READ[read](path)
