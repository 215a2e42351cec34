"""``.npz`` and ``.npy`` files that numpy wrote, and ones that nobody should have written."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.extra.numpy as arrays_of
import hypothesis.strategies as st
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import treering
from tests import meshes
from tests.command import inside
from tests.trees import assert_same
from treering.errors import CorruptError, FormatError, TreeringError, UnsupportedError

_ARRAYS: dict[str, Any] = {
    "raw": np.arange(12, dtype=np.float32).reshape(3, 4),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big": np.array([1, -2], ">i4"),
    "empty": np.zeros((0, 3)),
    "scalar": np.array(3 + 4j),
    "layer/0/bias~": np.array([True, False]),
}


@pytest.fixture(params=["stored", "deflated"])
def archive(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "a.npz"
    (np.savez if request.param == "stored" else np.savez_compressed)(path, **_ARRAYS, text="hällo", blob=b"xy")
    return path


def test_every_array_comes_back_bit_for_bit(archive: Path) -> None:
    found = treering.load(archive)
    assert list(found) == [*_ARRAYS, "text", "blob"]
    for key, array in _ARRAYS.items():
        assert found[key].dtype == array.dtype.newbyteorder("="), key
        np.testing.assert_array_equal(found[key], array)
    assert (found["text"], found["blob"]) == ("hällo", b"xy")


def test_the_verbs_know_it(archive: Path) -> None:
    listing = treering.inspect(archive)
    assert (listing.form, len(listing.leaves), listing.verified) == ("npz", 8, False)
    assert listing.leaves["raw"].shape == (3, 4)
    assert "npz, 8 arrays" in str(listing)
    assert treering.verify(archive).ok
    with treering.open(archive) as opened:
        np.testing.assert_array_equal(opened["fortran"][1:, ::2], _ARRAYS["fortran"][1:, ::2])
        np.testing.assert_array_equal(opened["raw"][1], _ARRAYS["raw"][1])
    assert treering.diff(archive, archive, values=True).differences == ()


def test_a_part_of_it_onto_a_mesh(archive: Path) -> None:
    rows = NamedSharding(meshes.line(3), PartitionSpec("x"))
    found = treering.load(archive, only="raw", shardings={"raw": rows})
    assert list(found) == ["raw"]
    assert found["raw"].sharding == rows
    np.testing.assert_array_equal(found["raw"], _ARRAYS["raw"])


def test_a_bare_array_and_an_empty_archive(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", _ARRAYS["raw"])
    np.testing.assert_array_equal(treering.load(tmp_path / "x.npy"), _ARRAYS["raw"])
    assert treering.inspect(tmp_path / "x.npy").form == "npy"
    np.savez(tmp_path / "x.npz")
    assert treering.load(tmp_path / "x.npz") == {}


@hypothesis.given(
    st.dictionaries(
        st.text("ab/~.", min_size=1, max_size=5),
        arrays_of.arrays(
            st.one_of(arrays_of.integer_dtypes(endianness="?"), arrays_of.floating_dtypes(sizes=(16, 32, 64))),
            arrays_of.array_shapes(min_dims=0, min_side=0, max_side=4),
        ),
        max_size=4,
    ),
    st.booleans(),
)
def test_any_archive_of_numpys(tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any], packed: bool) -> None:
    path = tmp_path_factory.mktemp("npz") / "a.npz"
    with path.open("wb") as file:
        (np.savez_compressed if packed else np.savez)(file, allow_pickle=False, **tree)
    found = treering.load(path)
    assert list(found) == list(tree)
    for key, array in tree.items():
        np.testing.assert_array_equal(found[key], array)


def test_pickled_objects_are_never_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", w=np.array([{}], dtype=object))
    with pytest.raises(UnsupportedError, match=r"'w\.npy' holds pickled Python objects.*never unpickles"):
        treering.load(tmp_path / "a.npz")


def test_the_others_of_an_archive_with_pickled_objects_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, w=np.arange(3), o=np.array([{}], dtype=object), t=np.array(["a", "bc"]))
    assert treering.load(path, only="w")["w"].tolist() == [0, 1, 2]
    with treering.open(path) as opened:
        assert opened["w"][1:].tolist() == [1, 2]
        with pytest.raises(UnsupportedError, match="pickled"):
            opened["o"][:]
    treering.convert(path, tmp_path / "out", only="w")
    assert treering.load(tmp_path / "out")["w"].tolist() == [0, 1, 2]
    assert "'o.npy' holds pickled Python objects, so that only its number of bytes" in str(treering.inspect(path))
    for whole in (treering.load, treering.verify):
        with pytest.raises(UnsupportedError, match=r"'o.npy' holds pickled.*only= reads the others"):
            whole(path)


@pytest.mark.parametrize("first", [np.arange(6.0), np.array(True)])
def test_a_file_of_equinox_is_named(tmp_path: Path, first: Any) -> None:
    with (tmp_path / "model.eqx").open("wb") as file:
        np.save(file, first)
        np.save(file, np.ones(3))
    (tmp_path / "head.eqx").write_bytes(b'{"width": 3}\n' + (tmp_path / "model.eqx").read_bytes())
    for name in ("model.eqx", "head.eqx"):
        for verb in (treering.load, treering.inspect, treering.abstract, treering.open):
            with pytest.raises(FormatError, match=r"file of equinox.*tree_deserialise_leaves"):
                verb(tmp_path / name)


def test_what_has_no_form_here_is_named(tmp_path: Path) -> None:
    for dtype in ("V2", "i4,f8"):
        np.savez(tmp_path / "a.npz", w=np.zeros(3, dtype))
        with pytest.raises(UnsupportedError, match=r"'w\.npy'"):
            treering.load(tmp_path / "a.npz")


def test_a_zip_of_something_else_is_no_npz(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as file:
        file.writestr("archive/data.pkl", b"\x80\x02")
    with pytest.raises(FormatError, match="PyTorch"):
        treering.load(tmp_path / "model.pt")


@pytest.mark.parametrize("stride", [29, pytest.param(7, marks=pytest.mark.slow)])
def test_damage_is_seen_or_harmless(archive: Path, stride: int) -> None:
    """Cut off or flipped anywhere, it is an error of ours, or everything is as it was."""
    data = archive.read_bytes()
    for at in range(0, len(data), stride):
        for damaged in (data[:at], data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]):
            archive.write_bytes(damaged)
            try:
                found = treering.load(archive)
            except TreeringError:
                continue
            assert list(found) == [*_ARRAYS, "text", "blob"], at
            assert all(np.array_equal(found[key], array) for key, array in _ARRAYS.items()), at


@pytest.mark.parametrize("change", ["name", "comment", "empty"])
def test_the_directory_of_an_archive_is_compared_with_its_entries(tmp_path: Path, change: str) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, first=np.arange(3), empty=np.asfortranarray(np.zeros((2, 0))), last=np.ones(2))
    data = bytearray(path.read_bytes())
    listed = data.index(b"PK\x01\x02")
    if change == "name":
        data[data.index(b"first", listed)] ^= 1
    elif change == "comment":
        data[listed + 33] ^= 1  # says that the first entry is longer, so that the others seem to be part of it
    else:
        data[data.index(b"(2, 0)") + 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError):
        treering.load(path)
    assert not treering.verify(path)


def test_a_deflated_array_that_was_changed_is_damaged(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, 10_000, np.uint8)
    np.savez_compressed(tmp_path / "a.npz", w=noise)
    data = bytearray((tmp_path / "a.npz").read_bytes())
    data[5000] ^= 1
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(CorruptError):
        treering.load(tmp_path / "a.npz")
    assert not treering.verify(tmp_path / "a.npz").ok


def test_an_array_larger_than_its_entry_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(4, np.float32))
    data = buffer.getvalue().replace(b"(4,), }", b"(4000000000000,), }").replace(b" " * 12 + b"\n", b"\n", 1)
    for name in ("x.npy", "x.npz"):
        path = tmp_path / name
        if name == "x.npy":
            path.write_bytes(data)
        else:
            with zipfile.ZipFile(path, "w") as file:
                file.writestr("w.npy", data)
        with pytest.raises(CorruptError, match="takes 16000000000000 bytes"):
            treering.load(path)


# ------------------------------------------------------------------------------------------------------------ checksums


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["raw", "fortran", "big", "scalar", "large", "text"])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_flipped_bit_is_damage_to_every_verb(tmp_path: Path, name: str, compressed: bool) -> None:
    path = tmp_path / "a.npz"
    # More than one window is read of it again.
    large: dict[str, Any] = (
        {"large": np.arange(3 << 20, dtype=np.float32).reshape(1 << 20, 3)} if name == "large" else {}
    )
    (np.savez_compressed if compressed else np.savez)(path, **_ARRAYS, **large, text="text")
    assert treering.load(path)["text"] == "text"
    with zipfile.ZipFile(path) as archive:
        entry = archive.getinfo(f"{name}.npy")
        end = entry.header_offset + 30 + len(entry.filename) + 20 + entry.compress_size
    data = bytearray(path.read_bytes())
    data[end - 1 if not compressed else end - 8] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError):
        treering.load(path, only=name)
    assert not treering.verify(path).ok
    with pytest.raises(CorruptError):
        treering.convert(path, tmp_path / "out")
    assert not (tmp_path / "out" / "treering.json").exists()
    if name == "large":
        rows = NamedSharding(meshes.line(4), PartitionSpec("x"))
        with pytest.raises(CorruptError, match="large"):
            treering.load(path, only=name, shardings=rows)


def test_verify_says_what_was_compared(archive: Path, tmp_path: Path) -> None:
    assert "CRC-32" in str(treering.verify(archive).note)
    np.save(tmp_path / "a.npy", _ARRAYS["raw"])
    assert "no checksums" in str(treering.verify(tmp_path / "a.npy").note)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_header_may_be_longer_than_what_is_read_first(method: int, tmp_path: Path) -> None:
    wanted = np.arange(400_000, dtype=np.int32)
    header = b"{'descr': '<i4', 'fortran_order': False, 'shape': (400000,), }".ljust(60_000) + b"\n"
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + wanted.tobytes()
    with zipfile.ZipFile(tmp_path / "a.npz", "w", method) as archive:
        for name in ("a", "b"):
            archive.writestr(f"{name}.npy", data)
    found = treering.load(tmp_path / "a.npz")
    assert np.array_equal(found["a"], wanted)
    assert np.array_equal(found["b"], wanted)


def test_the_longest_name_that_a_zip_can_hold_is_counted_in_bytes(tmp_path: Path) -> None:
    longest = "\u6a39" * 21_843  # of 3 bytes each; with ".npy" 65,533 of at most 65,535
    treering.export(tmp_path / "a.npz", {longest: np.ones(2)}, to="npz")
    with np.load(tmp_path / "a.npz") as found:
        assert found.files == [longest]
    with pytest.raises(UnsupportedError, match="no name of a tensor"):
        treering.export(tmp_path / "b.npz", {longest + "\u6a39": np.ones(2)}, to="npz")
    assert not (tmp_path / "b.npz").exists()


def test_numpy_reads_each_array_by_its_name(tmp_path: Path) -> None:
    tree = {"": np.ones(1), "arr_0": np.zeros(2), "b.npy": np.full(3, 2)}
    treering.export(tmp_path / "a.npz", tree)
    with np.load(tmp_path / "a.npz") as found:
        for name, array in tree.items():
            np.testing.assert_array_equal(found[name], array)
    assert_same(treering.load(tmp_path / "a.npz", tree), tree)


def test_a_name_that_numpy_takes_for_that_of_another_array_is_refused(tmp_path: Path) -> None:
    tree = {"a": np.ones(1), "a.npy": np.zeros(1)}
    with pytest.raises(UnsupportedError, match=r"numpy\.load reads 'a' where it is asked for 'a\.npy'"):
        treering.export(tmp_path / "a.npz", tree)
    assert not (tmp_path / "a.npz").exists()
    treering.export(tmp_path / "a.npz", tree, lose="names")
    with np.load(tmp_path / "a.npz") as found:
        assert found.files == ["a"]


def test_an_array_that_cannot_be_read_is_noted_where_it_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, names=np.array(["a", "tree"]), w=np.ones(2))
    out, err = inside("ls", str(path), code=0)
    assert out.splitlines()[1].split()[:2] == ["w", "float64"]
    assert err.startswith("note: the entry 'names.npy' is of the dtype <U4, which has no form here")
    np.savez(path, w=np.ones(2))
    assert inside("ls", str(path), code=0)[1] == ""


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    for name in "ab":
        np.savez(tmp_path / name, w=np.ones(1000))
    cut = tmp_path / "b.npz"
    cut.write_bytes(cut.read_bytes()[:500])
    for arguments, code in (["diff", tmp_path / "a.npz", cut], 2), (["ls", cut], 1):
        assert f"error: {str(cut)!r}: its directory is damaged" in inside(*map(str, arguments), code=code)[1]
    assert f"{cut} is damaged: its directory is damaged" in inside("verify", str(cut), code=1)[0]


@pytest.mark.parametrize("dtype", ["<M8[D]", ">M8[25s]", "<m8[ns]", "<M8", "<m8"])
def test_times_keep_their_unit_and_nat(dtype: str, tmp_path: Path) -> None:
    moments = np.array([[0, 1, 2**40], [-(2**63), -5, 7]], np.int64).astype(dtype[0] + "i8").view(dtype)
    given = {"c": moments, "f": np.asfortranarray(moments), "none": moments[:0], "one": moments[0, 1]}
    np.savez(tmp_path / "stored.npz", **given)
    np.savez_compressed(tmp_path / "deflated.npz", **given)
    treering.export(tmp_path / "ours.npz", given)
    treering.save(tmp_path / "ckpt", given)
    treering.convert(tmp_path / "ckpt", tmp_path / "converted.npz")
    for file in sorted(tmp_path.glob("*.npz")):
        assert treering.verify(file).ok
        for found in (treering.load(file), np.load(file)):
            for name, wanted in given.items():
                assert found[name].dtype.newbyteorder("=") == wanted.dtype.newbyteorder("="), file
                np.testing.assert_array_equal(found[name].astype("i8"), wanted.astype("i8"))
    np.save(tmp_path / "bare.npy", moments)
    np.testing.assert_array_equal(treering.load(tmp_path / "bare.npy"), moments)


def test_a_time_of_no_known_unit_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", t=np.array(["2020-01-01"], "M8[D]"), w=np.ones(2))
    data = (tmp_path / "a.npz").read_bytes()
    for wrong in (b"'<f8[D]'", b"'<M4[D]'", b"'<M8[x]'", b"'<M8[0]'"):
        (tmp_path / "b.npz").write_bytes(data.replace(b"'<M8[D]'", wrong))
        with pytest.raises(UnsupportedError, match=r"no form here.*save it as numbers, or as a text") as caught:
            treering.load(tmp_path / "b.npz")
        assert "with numpy" not in str(caught.value)
