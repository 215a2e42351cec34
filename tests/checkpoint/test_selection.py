"""load with ``only`` and ``at``: globs over key texts, subtrees as roots, and containers that lose children."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treering
from tests.system_calls import spans_read
from tests.trees import Point, assert_same
from treering.errors import FormatError, MismatchError

TREE: dict[Any, Any] = {
    "params": {
        "dense": {"kernel": 1, "bias": 2},
        "layers": [{"kernel": 3, "bias": 4}, {"kernel": 5, "bias": 6}, {"kernel": 7}],
        "empty": {},
    },
    "opt": (Point(8, (9, 10)), None),
    "step": 11,
    5: {True: 12, None: 13, (1, 2): 14, 1.5: 15},
    "a/b": {"~": 16, "": 17, "*": 18, "**": 19},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("selection") / "ckpt"
    treering.save(path, TREE)
    return path


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("only", "want"),
    [
        ("step", {"step": 11}),
        ("params/dense", {"params": {"dense": {"kernel": 1, "bias": 2}}}),
        ("params/dense/**", {"params": {"dense": {"kernel": 1, "bias": 2}}}),
        ("params/dense/*", {"params": {"dense": {"kernel": 1, "bias": 2}}}),
        ("params/*", {"params": TREE["params"]}),
        ("params", {"params": TREE["params"]}),
        ("params/*/kernel", {"params": {"dense": {"kernel": 1}}}),
        ("params/layers/1", {"params": {"layers": {1: {"kernel": 5, "bias": 6}}}}),
        ("params/layers/*/bias", {"params": {"layers": {0: {"bias": 4}, 1: {"bias": 6}}}}),
        ("params/layers/[01]", None),
        ("**/kernel", {"params": {"dense": {"kernel": 1}, "layers": [{"kernel": 3}, {"kernel": 5}, {"kernel": 7}]}}),
        ("**/k*l", {"params": {"dense": {"kernel": 1}, "layers": [{"kernel": 3}, {"kernel": 5}, {"kernel": 7}]}}),
        ("opt/0/x", {"opt": {0: {"x": 8}}}),
        ("opt/*/y/1", {"opt": {0: {"y": {1: 10}}}}),
        ("opt/1", {"opt": {1: None}}),
        (["step", "params/dense/bias"], {"params": {"dense": {"bias": 2}}, "step": 11}),
        (("step", "**"), TREE),
        ("**", TREE),
        ("*", TREE),
        ("**/**", TREE),
        ("5", {5: TREE[5]}),
        ("5/True", {5: {True: 12}}),
        ("5/*", {5: TREE[5]}),
        ("5/(1, 2)", {5: {(1, 2): 14}}),
        ("5/1.5", {5: {1.5: 15}}),
        ("5/None", {5: {None: 13}}),
        ("a~1b/~0", {"a/b": {"~": 16}}),
        ("a~1b/", {"a/b": {"": 17}}),
        ("a*b/~0", {"a/b": {"~": 16}}),
        ("a/b", None),
        ("**/empty", {"params": {"empty": {}}}),
        ("PARAMS", None),
        ("param", None),
        ("params/dense/kernel/more", None),
        ("params//kernel", None),
        ("", TREE),
    ],
    ids=str,
)
def test_only(only: Any, want: Any, path: Path) -> None:
    if want is None:
        with pytest.raises(MismatchError, match="nothing in the checkpoint matches"):
            treering.load(path, only=only)
    else:
        assert_same(treering.load(path, only=only), want)


@pytest.mark.parametrize(
    ("at", "want"),
    [
        ("", TREE),
        ("params", TREE["params"]),
        ("params/dense/kernel", 1),
        ("params/layers/1", {"kernel": 5, "bias": 6}),
        ("params/layers", TREE["params"]["layers"]),
        ("params/empty", {}),
        ("opt", TREE["opt"]),
        ("opt/0/y", (9, 10)),
        ("opt/1", None),
        ("5", TREE[5]),
        ("5/True", 12),
        ("a~1b", TREE["a/b"]),
        ("a~1b/", 17),
        ("a~1b/*", 18),
        ("a~1b/**", 19),
    ],
    ids=str,
)
def test_at(at: str, want: Any, path: Path) -> None:
    found = treering.load(path, at=at)
    assert_same(found, want)


@pytest.mark.parametrize("at", ["nothing", "params/", "/", "para", "params/layers/3", "params/dense/kernel/0", "a/b"])
def test_nothing_lies_there(at: str, path: Path) -> None:
    with pytest.raises(MismatchError, match="nothing lies at"):
        treering.load(path, at=at)


@pytest.mark.parametrize("text", ["a~3", "~", "a/~"])
def test_a_tilde_alone_is_no_key_text(text: str, path: Path) -> None:
    if text != "~":  # a part that is empty, which this tree does not have at its root
        with pytest.raises(FormatError, match="~"):
            treering.load(path, at=text)
        with pytest.raises(FormatError, match="~"):
            treering.load(path, only=text)
    else:
        with pytest.raises(MismatchError):
            treering.load(path, at=text)


def test_a_near_key_is_suggested(path: Path) -> None:
    with pytest.raises(MismatchError, match="did you mean 'params/dense'"):
        treering.load(path, at="params/densee")
    with pytest.raises(MismatchError, match="did you mean 'params/dense/kernel'"):
        treering.load(path, only="params/dense/kernl")
    for at, only in (("opt/0/", None), (None, "/opt/0/")):
        with pytest.raises(MismatchError, match="did you mean 'opt/0'"):
            treering.load(path, at=at, only=only)


TAKES = "only= takes the checkpoint's keys, not those of `like`"


@pytest.mark.parametrize(
    ("only", "at", "said"),
    [
        ("PARAMS", None, f"matches 'PARAMS'; did you mean 'params'?; {TAKES}"),
        ("zzz", None, f"matches 'zzz'; {TAKES}"),
        (
            "zzz*",
            None,
            f"matches 'zzz*'; {TAKES}; '*' stays inside one part of a key, '**/NAME' looks at every depth, and '~2' is "
            "a '*' in a key",
        ),
        ("zzz", "params", f"matches 'zzz'; {TAKES}; keys begin below `at`"),
        (
            "dense/**",
            None,
            f"{TAKES}; only='params/dense/**' with key_map={{'dense': 'params/dense'}} loads 'dense' of `like`",
        ),
    ],
)
def test_the_hint_is_about_what_was_asked(only: str, at: str | None, said: str, path: Path) -> None:
    with pytest.raises(MismatchError) as caught:
        treering.load(path, {"step": 0}, only=only, at=at)
    assert str(caught.value).endswith(said)


def test_the_hint_is_not_about_like_where_there_is_none(path: Path, tmp_path: Path) -> None:
    functions: list[Callable[[], object]] = [
        lambda: treering.load(path, only="dense/*"),
        lambda: treering.abstract(path, only="dense/*"),
        lambda: treering.convert(path, tmp_path / "new", only="dense/*"),
    ]
    told = "keys, from its root on; only='params/dense/*' selects it, only='**/dense/*' at every depth"
    for function in functions:
        with pytest.raises(MismatchError) as caught:
            function()
        assert str(caught.value).endswith(told)
    with pytest.raises(MismatchError, match=r"matches 'zzz'; only= takes the checkpoint's keys, those below `at`$"):
        treering.load(path, at="params", only="zzz")
    for only in ("params/dense/*", "**/dense/*"):
        assert treering.load(path, only=only) == {"params": {"dense": {"kernel": 1, "bias": 2}}}


def test_what_the_hint_proposes_loads(path: Path) -> None:
    like = {"dense": {"kernel": 0, "bias": 0}}
    with pytest.raises(MismatchError, match="only='params/dense/\\*\\*' with key_map="):
        treering.load(path, like, only="dense/**")
    found = treering.load(path, like, only="params/dense/**", key_map={"dense": "params/dense"})
    assert found == {"dense": {"kernel": 1, "bias": 2}}


def test_a_star_in_a_key_is_selected_by_its_escape(tmp_path: Path) -> None:
    treering.save(tmp_path / "c", {"a*": {"w": 1}, "ab": {"w": 2}, "**": 3, "~2": 4})
    assert treering.load(tmp_path / "c", only="a~2") == {"a*": {"w": 1}}
    assert treering.load(tmp_path / "c", only=["a~2/w", "~2~2"]) == {"a*": {"w": 1}, "**": 3}
    assert treering.load(tmp_path / "c", only="~02") == {"~2": 4}
    assert treering.load(tmp_path / "c", at="a*/w") == 1


@pytest.mark.parametrize("only", [[], ()])
def test_no_glob_at_all_is_refused(only: Any, path: Path) -> None:
    with pytest.raises(MismatchError, match="no glob"):
        treering.load(path, only=only)


def test_every_glob_must_match(path: Path) -> None:
    with pytest.raises(MismatchError, match="'opt/9'"):
        treering.load(path, only=["step", "opt/9", "params"])


def test_globs_begin_below_at(path: Path) -> None:
    assert treering.load(path, at="params", only="dense/bias") == {"dense": {"bias": 2}}
    assert treering.load(path, at="params/layers", only="*/bias") == {0: {"bias": 4}, 1: {"bias": 6}}
    assert treering.load(path, at="params/layers/0", only=["kernel", "bias"]) == {"kernel": 3, "bias": 4}
    assert treering.load(path, at="step", only="**") == 11
    with pytest.raises(MismatchError):
        treering.load(path, at="params", only="params/dense")


def test_a_namedtuple_that_loses_nothing_stays_one(path: Path) -> None:
    found = treering.load(path, only="opt/0")["opt"][0]
    assert type(found).__name__ == "Point"
    assert found._fields == ("x", "y")
    assert tuple(found) == (8, (9, 10))


def test_with_like(path: Path) -> None:
    like = {"params": {"dense": {"kernel": 0, "bias": 0}}}
    assert treering.load(path, like, only="params/dense") == {"params": {"dense": {"kernel": 1, "bias": 2}}}
    assert treering.load(path, like["params"], at="params", only="dense") == {"dense": {"kernel": 1, "bias": 2}}
    assert treering.load(path, 0, at="step") == 11
    with pytest.raises(MismatchError, match="unexpected"):
        treering.load(path, {"dense": {"kernel": 0}}, at="params", only="dense")
    with pytest.raises(MismatchError, match="step: missing"):
        treering.load(path, {"step": 0}, only="params")


def test_what_an_argument_leaves_out_is_not_called_missing_alone(path: Path) -> None:
    like: dict[str, Any] = {"params": {"dense": {"kernel": 0, "bias": 0}}, "opt": ..., "step": 0, "new": 0}
    with pytest.raises(MismatchError) as caught:
        treering.load(path, like, only="params/dense")
    assert caught.value.differences == (
        "opt: missing, `like` has `...` (only= leaves it out)",
        "step: missing, `like` has int (only= leaves it out)",
        "new: missing, `like` has int",
    )
    with pytest.raises(MismatchError) as caught:
        treering.load(path, like["params"] | {"step": 0, "layers": 0}, at="params", only=["dense", "layers/0"])
    assert caught.value.differences[:2] == (
        "step: missing, `like` has int (it lies outside of at='params')",
        "layers: missing, `like` has int (is it 'layers/0/bias'?)",
    )


def test_a_thinned_list_fits_a_dict_of_like(path: Path) -> None:
    like = {"params": {"layers": {1: {"kernel": 0, "bias": 0}}}}
    assert treering.load(path, like, only="params/layers/1")["params"]["layers"][1] == {"kernel": 5, "bias": 6}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("tree", [3, None, "x", {}, [], np.arange(3)], ids=repr)
def test_trees_without_keys(tree: Any, tmp_path: Path) -> None:
    treering.save(tmp_path / "c", tree)
    for only in ("", "**", None):
        for at in ("", None):
            assert_same(treering.load(tmp_path / "c", only=only, at=at), tree)
    with pytest.raises(MismatchError):
        treering.load(tmp_path / "c", only="a")
    with pytest.raises(MismatchError):
        treering.load(tmp_path / "c", at="a")


def test_arrays_that_are_left_out_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"a": jnp.arange(50_000.0), "b": {"c": np.arange(60_000), "d": "x" * 50_000}, "e": jnp.ones(10)}
    treering.save(tmp_path / "c", tree)
    spans = spans_read(monkeypatch)
    for only, nbytes in (("a", 200_000), ("b/c", 480_000), ("b", 530_000), ("e", 40), (["a", "e"], 200_040)):
        spans.clear()
        found = treering.load(tmp_path / "c", only=only)
        assert sum(size for _, size in spans) == nbytes
        assert len(jax.tree.leaves(found)) == {"b": 2}.get(str(only), len(only) if isinstance(only, list) else 1)


def test_only_and_at_on_single_files(tmp_path: Path) -> None:
    tree = {"params": {"w": np.arange(3), "b": np.arange(2)}, "layers": [np.zeros(1), np.ones(1)]}
    for name in ("c.msgpack", "c.safetensors"):
        treering.save(tmp_path / name, tree)
        assert_same(treering.load(tmp_path / name, only="params/w"), {"params": {"w": np.arange(3)}})
        assert_same(treering.load(tmp_path / name, at="params"), tree["params"])
        found = treering.load(tmp_path / name, only="layers/1")["layers"]
        assert [int(key) for key in found] == [1]
