"""Names and texts from files reach no terminal as they are: not by a repr, an error, a warning, nor by any verb."""

from __future__ import annotations

import contextlib
import json
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treering as tr
from tests.checkpoint.documents import Document, rewrite
from tests.cli.runs import add_step
from tests.command import inside

EVIL = "a\x1b[31m\u202eb\x07\nFORGED\r\x9b\u200b\x85\u2066c"
NEVER = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))


class Layer(NamedTuple):
    w: Any
    f: Any


def check(text: str) -> None:
    """Require that a text is safe on a terminal, and that no line of it was made by a name."""
    assert [each for each in text if each != "\n" and unicodedata.category(each) in NEVER] == []
    assert [line for line in text.splitlines() if line.startswith("FORGED")] == []


# ------------------------------------------------------------------------------------------------------ hostile files


def forge(document: Document) -> None:
    """Put names and texts of their own into an index, wherever a file may have any."""
    for node in document["structure"]:
        if isinstance(node, dict) and node["node"] == "namedtuple":
            node |= {"node": "other", "class": f"m.{EVIL}"}
            node["static"] = {EVIL: {"text": EVIL, "class": EVIL, "digest": EVIL}, "x": EVIL, "aux": {"tuple": [EVIL]}}
    for value in document["values"]:
        if isinstance(value, dict):
            value |= {"class": EVIL, "text": EVIL, "digest": EVIL}
    for kind in document["types"]:
        if "shape" in kind:
            kind["sharding"] = EVIL
        if "impl" in kind:
            kind["impl"] = EVIL
    document["meshes"] = [EVIL]
    document["written"] = {"by": EVIL, "at": EVIL, EVIL: EVIL}
    document["metadata"] = {EVIL: EVIL, "n": {EVIL: [EVIL]}}


def tree(n: int) -> Any:
    return {
        EVIL: {"w": np.arange(3.0) + n, EVIL: EVIL * n, 5: Layer(np.ones(n + 1), jax.nn.relu)},
        (EVIL, 1): n,
        "key": jax.random.key(n),
        "long": EVIL * 1000,
    }


def foreign(path: Path, n: int) -> Path:
    """A safetensors file of another writer."""
    header = json.dumps(
        {"__metadata__": {EVIL: EVIL}, EVIL: {"dtype": "F32", "shape": [n], "data_offsets": [0, 4 * n]}}
    ).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4 * n))
    return path


def a_run(path: Path, n: int) -> Path:
    for step in (1, 2):
        add_step(path, step, metrics={EVIL: float(n)}, keep=EVIL)
    return path


def checkpoint(path: Path, n: int) -> Path:
    tr.save(path, tree(n))
    rewrite(path, forge)
    return path


def msgpack(path: Path, n: int) -> Path:
    tr.serialization.save_to_file({EVIL: {EVIL: EVIL * n, "w": np.ones(n)}}, path)
    return path


def leaves(path: Path, n: int) -> Path:
    tr.leaves.tree_serialize_leaves(path, {EVIL: {EVIL: EVIL * n, "w": np.ones(n)}, "f": jax.nn.relu}, prefix="m")
    return path


FORMS: dict[str, tuple[str, Callable[[Path, int], Path]]] = {
    "checkpoint": (EVIL, checkpoint),
    "msgpack": (f"{EVIL}.msgpack", msgpack),
    "safetensors": (f"{EVIL}.safetensors", foreign),
    "leaves": (EVIL, leaves),
    "run": (EVIL, a_run),
}


@pytest.fixture(scope="module", params=FORMS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two files of one form."""
    name, make = FORMS[request.param]
    folders = [tmp_path_factory.mktemp(request.param) for _ in range(2)]
    first, second = (str(make(folder / name, n + 1)) for n, folder in enumerate(folders))
    return first, second


VERBS = [
    *(["ls"], ["inspect"], ["verify"], ["du"], ["doctor"], ["log"], ["gc"]),
    *(
        ["ls", EVIL],
        ["ls", "**"],
        ["ls", f"no{EVIL}"],
        ["inspect", "--depth", "1"],
        ["cat", EVIL],
        ["cat", f"no{EVIL}"],
    ),
    *(["ls", "--json"], ["inspect", "--json"], ["verify", "--json"], ["doctor", "--json"], ["log", "--json"]),
    *(["du", "--json"], ["du", "--depth", "1"], [f"no{EVIL}"], ["ls", f"--{EVIL}"]),
]


@pytest.mark.parametrize("verb", VERBS, ids=str)
def test_no_verb_shows_them(verb: list[str], pair: tuple[str, str]) -> None:
    for text in ran(verb[0], pair[0], *verb[1:]):
        check(text)


def test_diff_cat_and_errors_of_paths_show_none(pair: tuple[str, str]) -> None:
    for arguments in (["diff", *pair], ["diff", "--values", *pair], ["diff", "--json", *pair]):
        for text in ran(*arguments):
            check(text)
    for verb in ("ls", "inspect", "verify", "du", "doctor", "log", "gc", "cat", "diff"):
        for text in ran(verb, pair[0] + EVIL, *(pair[:1] if verb in ("diff", "cat") else ())):
            check(text)
    with contextlib.suppress(tr.errors.TreeringError):
        with tr.open(pair[0]) as opened:
            keys = list(opened)
        for key in keys:
            for text in ran("cat", pair[0], key):
                check(text)


def ran(*arguments: str) -> tuple[str, str]:
    """Run a verb, whatever its exit code is."""
    for code in (0, 1, 2):
        try:
            return inside(*arguments, code=code)
        except AssertionError as error:
            if code == 2:
                raise AssertionError(arguments) from error
    raise AssertionError


def texts(path: str, other: str) -> Iterator[str]:
    """Yield all that the library says of a file in Python."""
    for call in CALLS:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found = call(path, other)
                yield repr(found)
                if not isinstance(found, str):
                    yield str(found)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is shown
                yield str(error)
                yield repr(error)
                yield "\n".join(getattr(error, "__notes__", ()))
                yield "\n".join(getattr(error, "differences", ()))
        yield from (str(each.message) for each in caught)


def opened(path: str, look: Callable[[Any], Any]) -> Any:
    with tr.open(path) as found:
        return look(found)


def views(found: Any) -> list[str]:
    return [repr(found), repr(list(found.values())), repr(found.structure), found._repr_html_()]


LIKES = [{EVIL: 1}, {"w": 1}, {}, [1], {EVIL: {"w": np.zeros(1, "i1"), EVIL: {}, 5: Layer(np.ones(1), np.sin)}}]
CALLS: list[Callable[[str, str], Any]] = [
    lambda path, _: tr.load(path),
    lambda path, _: tr.load(path, tree(1)),
    lambda path, _: tr.load(path, tree(2)),
    *((lambda path, _, like=like: tr.load(path, like)) for like in LIKES),
    *((lambda path, _, like=like: tr.load(path, like, missing="keep", cast=True)) for like in LIKES),
    lambda path, _: tr.load(path, at=EVIL),
    lambda path, _: tr.load(path, at=f"{EVIL}/w"),
    lambda path, _: tr.load(path, at=f"{EVIL}/x"),
    lambda path, _: tr.load(path, only=f"{EVIL}x"),
    lambda path, _: tr.load(path, {EVIL: 1}, key_map={f"x{EVIL}": EVIL}),
    lambda path, _: tr.load(path + EVIL),
    lambda path, _: tr.save(path, {"w": 1}),
    lambda path, _: tr.save(path, {EVIL: {1, 2}, "b": {EVIL: object()}}, overwrite=True),
    lambda path, _: tr.save(path + "x", {1: 1, "1": EVIL}),
    lambda path, _: tr.save(path + "x", {1: 1, EVIL: 2, f"{EVIL}": 3}, metadata={EVIL: object()}),
    lambda path, _: getattr(tr.load(path)[EVIL]["5"], "nothing"),  # noqa: B009
    lambda path, _: getattr(tr.load(path)[EVIL][5], "nothing"),  # noqa: B009
    lambda path, _: opened(path, views),
    lambda path, _: opened(path, lambda found: found[EVIL]),
    lambda path, _: opened(path, lambda found: found[f"{EVIL}/nothing"]),
    lambda path, _: opened(path, lambda found: found.nothing),
    lambda path, _: tr.inspect(path),
    lambda path, _: tr.inspect(path)._repr_html_(),
    lambda path, _: tr.verify(path),
    lambda path, other: tr.diff(path, other, values=True),
    lambda path, _: tr.Run(path),
    lambda path, _: str(tr.Run(path)),
    lambda path, _: tr.Run(path).metrics(1),
    lambda path, _: tr.Run(path).best(f"x{EVIL}"),
    lambda path, _: tr.Run(path).load(7),
    lambda path, _: tr.Run(path).save(3, {EVIL: object()}),
    lambda path, _: tr.Run(path, keep=tr.KeepBest(EVIL)),
    lambda path, _: [tr.KeepBest(EVIL), tr.KeepLast(2) | tr.KeepBest(EVIL)],
    lambda path, _: tr.leaves.tree_deserialize_leaves(path),
    lambda path, _: tr.leaves.tree_deserialize_leaves(path, prefix=EVIL),
    lambda path, _: tr.leaves.tree_deserialize_leaves(path, prefix="m", target={EVIL: {"w": 1}, "x": 2}),
    lambda path, _: tr.serialization.load_from_file(None, path),
    lambda path, _: tr.serialization.load_from_file({EVIL: {"x": 1}}, path),
    lambda path, _: tr.serialization.from_state_dict({EVIL: 1}, {f"x{EVIL}": 2}),
    lambda path, _: tr.serialization.from_state_dict([1], {EVIL: 2}),
    lambda path, _: tr.serialization.to_bytes({EVIL: object()}),
    lambda path, _: tr.sharding.match_partition_rules([("no", P())], {EVIL: np.ones(2), EVIL * 2: np.ones(3)}),
    lambda path, _: tr.sharding.match_partition_rules([(EVIL[-1], EVIL)], {EVIL: np.ones(2)}),
    lambda path, _: tr.load(path, shardings={EVIL: EVIL, f"x{EVIL}": P(EVIL)}),
    lambda path, _: tr.load(path, shardings={EVIL: P(EVIL)}, mesh=jax.make_mesh((2,), ("x",))),
    lambda path, _: tr.load(path, shardings=lambda key, _: P(EVIL), mesh=jax.make_mesh((2,), ("x",))),
    lambda path, _: tr.load(path, mesh=jax.make_mesh((2,), (EVIL,)), shardings=P("x")),
    lambda path, _: tr.checkpoint.uncompared(tr.load(path)),
]


def test_no_repr_error_or_warning_shows_them(pair: tuple[str, str]) -> None:
    for text in texts(*pair):
        check(text)


def test_damage_is_told_without_them(pair: tuple[str, str], tmp_path: Path) -> None:
    """Each file, cut to half."""
    for name in (EVIL, f"{EVIL}.msgpack", f"{EVIL}.safetensors"):
        path = tmp_path / name
        path.write_bytes(EVIL.encode() * 100)
        for text in (*texts(str(path), pair[0]), *ran("verify", str(path)), *ran("inspect", str(path))):
            check(text)
    if Path(pair[0]).is_file():
        path.write_bytes(Path(pair[0]).read_bytes()[:-3])
        for text in (*texts(str(path), pair[0]), *ran("verify", str(path)), *ran("inspect", str(path))):
            check(text)
