"""treering diff and treering.diff: what two checkpoints do not have in common."""

from __future__ import annotations

import json
import math
import struct
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treering as package
from tests import meshes
from tests.cli.trees import Adam, in_every_form, saved, state
from tests.command import here, treering
from treering.errors import CorruptError, NotFoundError


def between(folder: Path, a: Any, b: Any, **options: Any) -> Any:
    one, two = folder / "a", folder / "b"
    for path, tree in ((one, a), (two, b)):
        package.save(path, tree, overwrite=True)
    return package.diff(one, two, **options)


def lines(found: Any) -> list[str]:
    return [str(difference) for difference in found]


def test_a_state_equals_itself(tmp_path: Path) -> None:
    found = between(tmp_path, state(), state(), values=True)
    assert not found
    assert (len(found), found.differences, found.leaves) == (0, (), 16)
    assert str(found) == "16 leaves, equal bit for bit"
    assert "values=True" in str(between(tmp_path, state(), state()))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        ({"x": 1}, {"x": 2}, ["x: value: 1 in A, 2 in B"]),
        ({"x": 1}, {"x": True}, ["x: kind: int 1 in A, bool True in B"]),
        ({"x": 0.0}, {"x": -0.0}, ["x: value: 0.0 in A, -0.0 in B"]),
        ({"x": 1}, {"y": 1}, ["x: only in A: int 1", "y: only in B: int 1"]),
        ({"x": {}}, {}, ["x: only in A: empty dict"]),
        ({"x": []}, {"x": ()}, ["x: node: empty list in A, empty tuple in B"]),
        ({"x": [1]}, {"x": (1,)}, ["x: node: list in A, tuple in B"]),
        ({"x": [1]}, {"x": 1}, ["x: node: list in A, int 1 in B"]),
        (
            {"x": Adam(1, {})},
            {"x": {"count": 1, "mu": {}}},
            ["x: node: namedtuple tests.cli.trees.Adam in A, dict in B"],
        ),
        ({"x": "a"}, {"x": b"a"}, ["x: kind: str 'a' in A, bytes b'a' in B"]),
        ({"x": 1j}, {"x": 2j}, ["x: value: 1j in A, 2j in B"]),
        ({"x": "a" * 5000}, {"x": "a" * 5001}, ["x: size: 5000 bytes in A, 5001 bytes in B"]),
        ({"x": math.sqrt}, {"x": math.sin}, ["x: value: math.sqrt in A, math.sin in B"]),
        (7, 8, ["(the root): value: 7 in A, 8 in B"]),
        (
            {"x": jnp.ones((2, 3))},
            {"x": jnp.ones((3, 2), jnp.bfloat16)},
            ["x: dtype: float32 in A, bfloat16 in B", "x: shape: [2, 3] in A, [3, 2] in B"],
        ),
        ({"x": jnp.ones(2)}, {"x": np.ones(2, np.float32)}, ["x: kind: jax float32[2] in A, numpy float32[2] in B"]),
    ],
)
def test_what_is_told(tmp_path: Path, a: Any, b: Any, wanted: list[str]) -> None:
    found = between(tmp_path, a, b, values=True)
    assert lines(found) == wanted
    assert bool(found)


def test_what_is_no_difference(tmp_path: Path) -> None:
    assert not between(tmp_path, {"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert not between(tmp_path, {"x": math.nan}, {"x": math.nan})
    assert not between(tmp_path, {"x": np.array([np.nan, 1.0])}, {"x": np.array([np.nan, 1.0])}, values=True)


def test_values_are_compared_bit_for_bit(tmp_path: Path) -> None:
    a = np.arange(12.0).reshape(3, 4)
    b = a.copy()
    b[1, 2], b[2, 3] = 0.5, np.nan
    assert lines(between(tmp_path, {"x": a}, {"x": b}, values=True)) == [
        "x: values: 2 of 12 items differ, the first at [1, 2]: 6.0 in A, 0.5 in B"
    ]
    zeros = lines(between(tmp_path, {"x": np.array(0.0)}, {"x": np.array(-0.0)}, values=True))
    assert zeros == ["x: values: 1 of 1 item differ, the first at []: 0.0 in A, -0.0 in B"]
    other = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]
    (nans,) = lines(between(tmp_path, {"x": np.array([np.nan])}, {"x": np.array([other])}, values=True))
    assert "nan (0x7ff8000000000000) in A, nan (0x7ff8000000000001) in B" in nans


def test_long_texts_are_read(tmp_path: Path) -> None:
    a, b = "x" * 6000, "x" * 5000 + "y" + "x" * 999
    (sums,) = lines(between(tmp_path, {"t": a}, {"t": b}))
    assert sums.startswith("t: values: the checksums differ: ")
    (line,) = lines(between(tmp_path, {"t": a}, {"t": b}, values=True))
    assert line.startswith("t: values: from place 5000 on: 'xxxx")


def test_a_change_of_one_bit_shows_without_a_read(tmp_path: Path) -> None:
    a = {"small": np.arange(3, dtype="u1"), "large": np.zeros(1 << 18, "u1"), "same": np.ones(3)}
    b = {"small": a["small"] ^ np.array([0, 0, 1], "u1"), "large": a["large"].copy(), "same": np.ones(3)}
    b["large"][-1] = 128
    found = between(tmp_path, a, b)
    assert [(each.key, each.what, each.detail) for each in found] == [
        ("small", "values", "the checksums differ"),
        ("large", "values", "the checksums differ"),
    ]
    assert (found.values, found.checksums) == (False, True)
    assert all(each.a != each.b for each in found)
    equal = between(tmp_path, a, a)
    assert (bool(equal), equal.checksums) == (False, True)
    assert str(equal) == "3 leaves, equal as far as checksums tell (values=True reads the arrays)"


def test_checksums_of_other_boxes_are_not_compared(tmp_path: Path) -> None:
    numbers, mesh = jnp.arange(64.0).reshape(8, 8), meshes.line()
    rows, columns = (jax.device_put(numbers, NamedSharding(mesh, spec)) for spec in (P("x"), P(None, "x")))
    found = between(tmp_path, {"x": rows}, {"x": columns})
    assert (bool(found), found.checksums) == (False, False)
    assert "as far as headers tell" in str(found)


def test_metadata(tmp_path: Path) -> None:
    package.save(tmp_path / "a", {"x": 1}, metadata={"loss": 1, "run": {"a": 1, "b": 2}, "old": None})
    package.save(tmp_path / "b", {"x": 1}, metadata={"loss": 1.0, "run": {"b": 2, "a": 1}, "new": 3})
    assert lines(package.diff(tmp_path / "a", tmp_path / "b")) == [
        "metadata loss: 1 in A, 1.0 in B",
        "metadata old: only in A: null",
        "metadata new: only in B: 3",
    ]


def test_every_pair_of_forms(tmp_path: Path) -> None:
    found = in_every_form(tmp_path)
    del found["foreign"]
    for one in found.values():
        for other in found.values():
            assert not package.diff(one, other, values=True), (one, other)
    assert package.diff(found["gzip"], in_every_form(tmp_path / "more")["foreign"])


def test_another_mesh_is_no_difference(tmp_path: Path) -> None:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = meshes.line()
    spec = PartitionSpec("x")  # type: ignore[no-untyped-call, unused-ignore]
    array = np.arange(len(jax.devices()) * 6.0).reshape(-1, 6)
    cut = jax.device_put(array, NamedSharding(mesh, spec))
    assert not between(tmp_path, {"x": cut}, {"x": jnp.asarray(array)}, values=True)


def test_what_a_run_notes_of_its_steps_is_no_difference(tmp_path: Path) -> None:
    for name, loss, tags in (
        ("a", 0.5, {"git": "1", "host": {"": 1, "n/m": 2}}),
        ("b", 0.25, {"git": "1", "host": {"": 3}}),
    ):
        with package.Run(tmp_path / name) as run:
            run.save(1, {"w": 1}, metrics={"loss": loss})
            run.save(2, {"w": 1}, metrics={"loss": loss}, metadata=tags)
    assert not package.diff(tmp_path / "a" / "step_00000001", tmp_path / "b" / "step_00000001")
    found = package.diff(tmp_path / "a" / "step_00000002", tmp_path / "b" / "step_00000002")
    assert list(map(str, found)) == ["metadata host/: 1 in A, 3 in B", "metadata host/n~1m: only in A: 2"]
    said = here("diff", str(tmp_path / "a"), str(tmp_path / "b"), code=1).stdout
    assert "treering" not in said
    assert len(said.splitlines()) == 3  # the last one says how arrays were compared


def test_a_users_own_member_called_treering_is_compared(tmp_path: Path) -> None:
    for name in ("a", "b"):
        package.save(tmp_path / name, {"w": 1}, metadata={"treering": name})
    assert list(map(str, package.diff(tmp_path / "a", tmp_path / "b"))) == ['metadata treering: "a" in A, "b" in B']


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    tree = {"x": np.arange(3_000_000), "y": np.zeros((0, 3)), "z": np.arange(10)}
    between(tmp_path, tree, tree, values=True, progress=lambda done, total: seen.append((done, total)))
    total = 8 * 3_000_010
    assert {each[1] for each in seen} == {total}
    done = [each[0] for each in seen]
    assert done == sorted(done)
    assert done[-1] == total
    assert len(done) > 3


def test_errors_are_the_usual_ones(tmp_path: Path) -> None:
    path = saved(tmp_path / "a")
    with pytest.raises(NotFoundError):
        package.diff(path, tmp_path / "nope")
    data = next(path.glob("data-*"))
    content = bytearray(data.read_bytes())
    content[4100] ^= 1
    data.write_bytes(content)
    other = saved(tmp_path / "b")
    assert not package.diff(path, other)
    with pytest.raises(CorruptError):
        package.diff(path, other, values=True)


def test_the_verb(tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a", {"x": np.arange(3.0), "n": 1}), saved(tmp_path / "b", {"x": np.ones(3), "n": 1})
    assert treering("diff", str(a), str(b), code=1).stdout.startswith("x: values: the checksums differ: ")
    same = here("diff", str(a), str(a), code=0).stdout
    assert same.endswith("equal as far as checksums tell (--values reads the arrays)\n")
    for path, tree in (("c.msgpack", np.arange(3.0)), ("d.msgpack", np.ones(3))):
        package.save(tmp_path / path, tree)
    headers = here("diff", str(tmp_path / "c.msgpack"), str(tmp_path / "d.msgpack"), code=0).stdout
    assert headers.endswith("equal as far as headers tell (--values reads the arrays)\n")
    assert "equal bit for bit" in here("diff", str(a), str(a), "--values", code=0).stdout
    assert here("diff", str(a), str(b), "--values", code=1).stdout == (
        "x: values: 2 of 3 items differ, the first at [0]: 0.0 in A, 1.0 in B\n"
    )
    found = json.loads(here("diff", str(a), str(b), "--values", "--json", code=1).stdout)
    assert (found["schema"], found["same"], found["values"], found["leaves"]) == ("treering.diff/1", False, True, 2)
    assert found["differences"] == [
        {"key": "x", "what": "values", "a": "0.0", "b": "1.0", "detail": "2 of 3 items differ, the first at [0]"}
    ]
    assert json.loads(here("diff", str(a), str(a), "--json", code=0).stdout)["differences"] == []
    assert here("diff", str(a), str(tmp_path / "nope"), code=2).stderr.startswith("error: ")
    (b / "treering.json").write_bytes(b"{}")
    assert "damaged" in here("diff", str(a), str(b), code=2).stderr


def test_many_differences_are_counted(tmp_path: Path) -> None:
    found = between(tmp_path, {str(n): n for n in range(500)}, {str(n): n + 1 for n in range(500)})
    assert str(found).splitlines()[0].startswith("500 differences")
    assert str(found).splitlines()[-1] == "  ... and 400 more"


@pytest.mark.parametrize("shape", [(3, 5 << 20), (2, 9 << 20), (2, 3, 3 << 20)], ids=str)
def test_every_item_of_large_arrays_is_compared_once(tmp_path: Path, shape: tuple[int, ...]) -> None:
    one = np.zeros(shape, np.uint8)
    other = one.copy()
    places = np.random.default_rng(0).choice(one.size, 1000, replace=False)
    places[:2] = 0, one.size - 1
    other.flat[places] = 1
    first = ", ".join(map(str, np.argwhere(other)[0]))
    count = int(other.sum())
    (difference,) = between(tmp_path, {"x": one}, {"x": other}, values=True)
    assert f"{count:,} of {one.size:,} items differ, the first at [{first}]" in difference.detail


def test_how_arrays_were_compared_is_said_beside_differences_too(tmp_path: Path) -> None:
    one, two = (str(tmp_path / name) for name in ("a", "b"))
    for path, step in ((one, 1), (two, 2)):
        package.save(path, {"step": step, "w": np.ones(3)})
        np.savez(f"{path}.npz", step=np.array(step, f"u{step}"), w=np.ones(3))
    told = "arrays were compared by {} (--values reads them)"
    assert here("diff", one, two, code=1).stdout.splitlines() == [
        "step: value: 1 in A, 2 in B",
        told.format("checksums"),
    ]
    assert here("diff", f"{one}.npz", f"{two}.npz", code=1).stdout.splitlines()[-1] == told.format("headers")
    assert here("diff", one, two, "--values", code=1).stdout.splitlines() == ["step: value: 1 in A, 2 in B"]


def test_a_value_is_escaped_once(tmp_path: Path) -> None:
    one, two = (str(tmp_path / name) for name in ("a", "b"))
    package.save(one, {"s": "a\\b\n\x1b"}, metadata={"note": 'say "x"'})
    package.save(two, {"s": "c"}, metadata={"note": "\u202e"})
    shown = r"'a\\b\n\x1b'"
    assert here("ls", one, code=0).stdout.split()[2] == shown
    assert shown in here("inspect", one, code=0).stdout
    assert r'{"note": "say \"x\""}' in here("inspect", one, code=0).stdout
    assert here("diff", one, two, code=1).stdout.splitlines()[:2] == [
        f"s: value: {shown} in A, 'c' in B",
        r'metadata note: "say \"x\"" in A, "\u202e" in B',
    ]


@pytest.mark.parametrize(("one", "other"), [(1, "1"), (True, "True"), (1.5, "1.5"), ((0, 1), "(0, 1)")])
def test_keys_of_one_name_and_of_two_types_differ(tmp_path: Path, one: Any, other: Any) -> None:
    found = between(tmp_path, {"d": {one: np.zeros(2)}}, {"d": {other: np.zeros(2)}}, values=True)
    assert [str(each) for each in found] == [f"d: node: the key {one!r} in A, the key {other!r} in B"]
    assert not between(tmp_path, {one: 1, math.nan: 2}, {math.nan: 2, one: 1}, values=True)


def test_values_with_the_same_text_are_told_apart(tmp_path: Path) -> None:
    one = {"n": 10**400, "f": struct.unpack(">d", bytes.fromhex("7ff8000000000000"))[0]}
    other = {"n": 10**400 + 1, "f": struct.unpack(">d", bytes.fromhex("fff8000000000000"))[0]}
    for found in between(tmp_path, one, other):
        assert found.a != found.b
        assert "()" not in str(found)


def test_who_looks_waits_for_a_save_in_flight(tmp_path: Path) -> None:
    old, new, go = tmp_path / "old", tmp_path / "new", threading.Event()
    package.save(old, {"w": np.zeros(2)})
    package.save_async(old, {"w": np.ones(2)}, overwrite=True, progress=lambda *_: go.wait(60))
    package.save_async(new, {"w": np.ones(2)})
    threading.Timer(0.1, go.set).start()
    assert package.verify(new).ok
    assert not package.diff(old, new, values=True)
    package.save_async(tmp_path / "newer", {"w": np.ones(2)})
    assert list(package.inspect(tmp_path / "newer").leaves) == ["w"]
