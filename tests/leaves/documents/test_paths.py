"""Folders of leaves: injective, inside the directory, and another program's where the key is an ordinary one."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from treering._leaves.documents.record import escape, find_overlap, folder_of, parts_of_folder, prefix_folder, unescape
from treering._values.keys import join_key
from treering.errors import CorruptError, FormatError, UnsupportedError

any_character = st.characters(exclude_categories=())
parts = st.one_of(st.text(any_character, max_size=8), st.text(alphabet="a%-.2E0/\\~:é\ud800\udc00\x00", max_size=8))
paths = st.lists(parts, max_size=4).map(tuple)


@given(parts)
@example("%")
@example("%-")
@example("%2e")
@example("%C3%A9")
@example("\ud83d\ude00")
def test_a_part_survives_its_escape(part: str) -> None:
    name = escape(part)
    assert unescape(name) == part
    assert name not in {"", ".", ".."}
    assert not any(character in name for character in "./\\:\0\n")
    name.encode()  # half surrogates would fail


@given(parts, parts)
def test_different_parts_have_different_names(one: str, other: str) -> None:
    assert (escape(one) == escape(other)) == (one == other)


@given(parts)
def test_a_name_that_no_escape_gives_stands_for_itself(name: str) -> None:
    part = unescape(name)
    assert part == name or escape(part) == name


@given(paths)
def test_the_parts_of_a_key_lie_in_their_folder(path: tuple[str, ...]) -> None:
    folder = folder_of(None, join_key(path))
    assert folder == ("/".join(map(escape, path)) or "%-")
    if path:
        assert parts_of_folder(folder, None) == path
    assert parts_of_folder(folder_of("a.b", join_key(path)), "a.b") == path


@given(st.lists(paths, min_size=2, max_size=2, unique=True))
def test_different_keys_lie_in_different_folders(two: list[tuple[str, ...]]) -> None:
    if set(two) != {(), ("",)}:  # a bare array is the only leaf of its tree
        assert len({folder_of(None, join_key(path)) for path in two}) == 2
    assert len({folder_of("p", join_key(path)) for path in two}) == 2


@pytest.mark.parametrize(
    ("prefix", "path", "folder"),
    [
        (None, ("params", "dense", "kernel"), "params/dense/kernel"),
        (None, ("layers", "10"), "layers/10"),
        (None, ("Größe", "重み", "a b"), "Größe/重み/a b"),
        (None, ("50%", "100%x", "%2e", "% 2E"), "50%/100%x/%2e/% 2E"),
        (None, ("layer.0",), "layer%2E0"),
        (None, ("a/b", "c\\d", "e:f"), "a%2Fb/c%5Cd/e%3Af"),
        (None, (".", ".."), "%2E/%2E%2E"),
        (None, ("%2E", "%-"), "%252E/%25-"),
        (None, ("é.",), "é%2E"),
        (None, ("\x85", "\x7f", "\n"), "%C2%85/%7F/%0A"),
        (None, ("\ud800",), "%ED%A0%80"),
        (None, ("~", "~0"), "~/~0"),
        (None, (".treering", "x"), "%2Etreering/x"),
        (None, ("tensorstore_index.json",), "tensorstore_index%2Ejson"),
        (None, (".zarray",), "%2Ezarray"),
        (None, (), "%-"),
        (None, ("",), "%-"),
        (None, ("a", ""), "a/%-"),
        ("", ("a",), "a"),
        ("model", (), "model"),
        ("model", ("",), "model/%-"),
        ("model.ema/x", ("w",), "model/ema/x/w"),
    ],
    ids=ascii,
)
def test_folders_by_example(prefix: str | None, path: tuple[str, ...], folder: str) -> None:
    assert folder_of(prefix, join_key(path)) == folder


def test_a_key_text_has_to_be_one() -> None:
    with pytest.raises(FormatError, match="stands alone"):
        folder_of(None, "a~/b")


@pytest.mark.parametrize("part", ["a" * 255, "é" * 127, "." * 85], ids=["ascii", "two bytes", "escaped"])
def test_the_longest_names_can_be_made(part: str, tmp_path: Path) -> None:
    (tmp_path / folder_of(None, join_key((part,)))).mkdir()
    with pytest.raises(UnsupportedError, match="bytes long") as caught:
        folder_of("model", join_key(("x", part + part[0], "y")))
    assert caught.value.path == ("x", part + part[0], "y")


def test_many_short_parts_are_no_long_name() -> None:
    assert folder_of(None, "/".join(["abc"] * 200)) == "/".join(["abc"] * 200)


@pytest.mark.parametrize(
    "prefix",
    ["/a", "a/", "a//b", "..", "a..b", ".", "a\\b", "a:b", "a\0", "a\n", "%2E", "x%-", "\ud800", "a" * 256, "é" * 128],
    ids=ascii,
)
def test_prefixes_that_are_no_path_are_refused(prefix: str) -> None:
    with pytest.raises(UnsupportedError, match="the prefix"):
        prefix_folder(prefix)
    with pytest.raises(ValueError, match="the prefix"):
        folder_of(prefix, "w")


@pytest.mark.parametrize(
    ("folder", "prefix", "path"),
    [
        (".", None, ()),
        ("model", "model", ()),
        ("model/w", "model", ("w",)),
        ("model/w", None, ("model", "w")),
        ("models/w", "model", ("models", "w")),
        ("other/w", "model", ("other", "w")),
        ("a/b/w", "a.b", ("w",)),
        ("a/b/w", "/a/b/", ("w",)),
        ("a\\b/w.x", "a\\b", ("w.x",)),
        ("layer%2E0/%-", None, ("layer.0", "")),
        ("%41/%ED%A0/%FF", None, ("%41", "%ED%A0", "%FF")),
    ],
    ids=ascii,
)
def test_what_a_folder_says(folder: str, prefix: str | None, path: tuple[str, ...]) -> None:
    assert parts_of_folder(folder, prefix) == path


@pytest.mark.parametrize("folder", ["", "/etc", "a/../b", "..", "a//b", "a/", "./a", "a/.", "a\0b"], ids=ascii)
def test_folders_outside_are_refused(folder: str) -> None:
    with pytest.raises(CorruptError, match="leads out"):
        parts_of_folder(folder, None)


@given(st.lists(st.sampled_from(["a", "a/b", "a/b/c", "ab", "a-b", "a.b", "a b", "b", "a/b-", "a/b0"]), max_size=6))
def test_overlaps_are_found_as_a_naive_search_finds_them(folders: list[str]) -> None:
    naive = {
        (one, other)
        for (i, one), (j, other) in itertools.permutations(enumerate(folders), 2)
        if other.startswith(f"{one}/") or (one == other and i < j)
    }
    found = find_overlap(folders)
    assert (found in naive) if naive else found is None


def test_overlaps_among_many_and_deep_folders_take_no_time_to_find() -> None:
    many = [f"params/layer_{number}/kernel" for number in range(50_000)]
    assert find_overlap(many) is None
    assert find_overlap([*many, "params/layer_7"]) == ("params/layer_7", "params/layer_7/kernel")
    deep = "/".join("a" * 100_000)
    assert find_overlap([deep, deep[:-2]]) == (deep[:-2], deep)
