"""The errors that a user meets have public names."""

from __future__ import annotations

import ast
import builtins
import copy
import errno
import functools
import gzip
import pickle
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import treering
from treering import errors, leaves, serialization

SOURCE = Path(treering.__file__).parent

OF_PEERS = {
    "AbsentItemError": "flax raises KeyError for a list item that is missing",
    "AlreadyRegisteredError": "flax raises ValueError for a handler that is there already",
    "BadPatternError": "eformer lets re.error through",
    "DamagedGzipError": "gzip raises BadGzipFile",
    "IntTooLargeError": "msgpack raises OverflowError",
    "NotADictError": "flax fails with AttributeError on a state that is no dict",
    "NotChunkedError": "flax fails with KeyError on a map that looks like a chunked array",
    "NotItemsError": "flax fails with TypeError on a state that is no list",
    "NotStringKeyError": "flax asserts that keys are str",
    "ShortGzipError": "gzip raises EOFError",
    "StructureMismatchError": "the base of three above",
    "UnhashableKeyError": "msgpack raises TypeError",
    "UnknownDtypeError": "flax fails with TypeError on the name of a dtype",
}
"""Classes of the drop-in doors: each is a public error, and beside that the class that programs for a peer catch."""

CAUGHT_INSIDE = {
    "IndexRemovedError": "a tombstone; a caller sees the NotFoundError that it is",
    "NotKept": "a cast that would change a value: MismatchError says which leaf",
    "OutOfStep": "the executor of the protocol raises the TimedOutError that it is",
    "OutcomeKnown": "the protocol raises the error in it",
    "Renumbered": "the joint save is begun anew",
    "Reopen": "the joint load is begun anew, or raises the error in it",
    "ShortAnswer": "the request is made again; at the end StoreError says so",
}
"""Classes that never reach a caller, except as the public error that they are."""


@functools.cache
def statements() -> list[ast.ClassDef | ast.Raise]:
    """Return all classes and raises of treering; its modules are parsed once."""
    return [
        node
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef | ast.Raise)
    ]


def defined() -> dict[str, ast.ClassDef]:
    """Return the classes of treering that are errors or warnings, by name."""
    classes = {node.name: node for node in statements() if isinstance(node, ast.ClassDef)}

    def is_error(name: str) -> bool:
        base = getattr(builtins, name, None)
        if isinstance(base, type):
            return issubclass(base, BaseException)
        return name in classes and any(is_error(ast.unparse(one).rpartition(".")[2]) for one in classes[name].bases)

    return {name: node for name, node in classes.items() if is_error(name)}


def test_every_error_is_public_or_is_said_here_why_not() -> None:
    private = {name for name in defined() if not name.startswith("_")} - set(errors.__all__)
    assert private == OF_PEERS.keys() | CAUGHT_INSIDE.keys()


def test_the_errors_of_the_drop_in_doors_are_public_ones_too() -> None:
    found = defined()

    def is_public(name: str) -> bool:
        return name in errors.__all__ or (
            name in found and any(is_public(ast.unparse(one)) for one in found[name].bases)
        )

    assert [name for name in OF_PEERS if not is_public(name)] == []
    assert [name for name in OF_PEERS if not name.endswith("Error")] == []


def test_whatever_is_raised_by_its_name_is_known() -> None:
    known = {*errors.__all__, *dir(builtins), *OF_PEERS, *CAUGHT_INSIDE}
    raised = {
        called.id
        for node in statements()
        if isinstance(node, ast.Raise)
        and isinstance(called := node.exc.func if isinstance(node.exc, ast.Call) else node.exc, ast.Name)
        and called.id[:1].isupper()
    }
    assert {name for name in raised - known if not name.startswith("_")} == set()


def test_each_error_is_an_attribute_of_the_module_and_documented() -> None:
    for name in errors.__all__:
        found = getattr(errors, name)
        assert issubclass(found, Exception)
        assert found.__doc__


def test_an_error_of_the_system_says_which_in_another_process_too() -> None:
    for code in (errno.ENOSPC, errno.EACCES, errno.ENOENT):
        error = errors.StoreError.of(OSError(code, "no"), "a.msgpack", "write")
        others: list[Any] = [pickle.loads(pickle.dumps(error)), copy.copy(error)]
        assert all(isinstance(again, OSError) for again in others)
        for again in others:
            assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
            assert (again.errno, again.filename, again.strerror) == (code, "a.msgpack", "no")


def test_an_error_of_two_builtin_classes_is_copied_and_told_by_a_later_save(tmp_path: Path) -> None:
    damaged = bytearray(gzip.compress(serialization.to_bytes({"a": np.zeros(300)})))
    damaged[-6] ^= 1
    (tmp_path / "a.msgpack.gz").write_bytes(damaged)
    with pytest.raises(gzip.BadGzipFile) as raised:
        treering.load(tmp_path / "a.msgpack.gz")
    error: Any = raised.value
    error.errno = errno.EIO
    again: Any
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(again), str(again), again.errno) == (type(error), str(error), errno.EIO)

    def progress(done: int, total: int) -> None:
        raise error

    path = tmp_path / "ckpt"
    treering.save_async(path, {"a": np.zeros(3)}, progress=progress)
    with pytest.raises(errors.CorruptError, match=r"the earlier save to .* failed: .*the gzip data is damaged"):
        treering.save(path, {"a": np.zeros(3)})


def test_a_missing_file_of_an_index_is_damage_and_its_cause_says_which(tmp_path: Path) -> None:
    leaves.tree_serialize_leaves(tmp_path, {"w": jnp.ones(3)})
    (tmp_path / "w" / "0").unlink()
    with pytest.raises(errors.CorruptError) as caught:
        treering.load(tmp_path)
    assert isinstance(caught.value.__cause__, errors.DataFileMissingError)
