"""The contracts that are shipped, on our own readers and writers and on the example of the page."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import treering
from treering._checkpoint.detect import _READERS, _detect_file, find_foreign, readers_in
from treering._store.resolve import is_folder
from treering.errors import FormatError, UnsupportedError
from treering.testing import ReaderContract, WriterContract

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "plug-points.md"
GOLDEN = Path(__file__).parent / "golden"
ARRAYS: dict[str, Any] = {
    "a": np.arange(60_000, dtype=np.float32).reshape(300, 200),
    "b": np.array([1, -2], np.int8),
    "c": np.array(2.5, np.float16),
}


def example_module() -> str:
    text = PAGE.read_text(encoding="utf-8")
    start = text.index("```python\n") + len("```python\n")
    return text[start : text.index("```\n", start)]


class Folders:
    """Gives new folders below that of a test."""

    @pytest.fixture(autouse=True)
    def _folders(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.make: Callable[[], Path] = lambda: tmp_path_factory.mktemp("contract")

    def new_folder(self) -> Path:
        return self.make()


class OurReader(Folders, ReaderContract):
    """One of our readers, which is asked only where names or first bytes call for it."""

    path: ClassVar[str]

    def module(self) -> Any:
        return importlib.import_module(self.path)

    def recognise(self, place: Path) -> str | None:
        if is_folder(place):
            called = list(readers_in(place))
        else:
            called = [reader for reader in _READERS if place.read_bytes().startswith(reader.magics or b"?")]
        found = find_foreign(place, [reader for reader in called if reader.module == self.path])
        return None if found is None else found.version


class TestNumpyReader(OurReader):
    path = "treering._foreign.numpy_files"
    also_reads = ("tree.npz",)

    def make_example(self, folder: Path) -> tuple[Path, Mapping[str, Any]]:
        np.savez(folder / "a.npz", **ARRAYS)
        return folder / "a.npz", ARRAYS


class TestHuggingFaceReader(OurReader):
    path = "treering._foreign.huggingface"
    also_reads = ("hf",)

    def make_example(self, folder: Path) -> tuple[Path, Mapping[str, Any]]:
        treering.export(folder / "hf", ARRAYS, to="hf", max_file_size=1000)
        return folder / "hf", ARRAYS


class GoldenReader(OurReader):
    """A reader whose example is a folder that the program itself wrote."""

    golden: ClassVar[str]

    def make_example(self, folder: Path) -> tuple[Path, Mapping[str, Any]]:
        path = Path(shutil.copytree(GOLDEN / self.golden, folder / "golden"))
        with treering.open(path) as opened:
            arrays = {key: np.asarray(opened[key]) for key in opened if hasattr(opened[key], "dtype")}
        assert arrays
        return path, arrays


class TestOrbaxReader(GoldenReader):
    path = "treering._foreign.orbax"
    golden = "orbax/plain_zarr2"


class TestJaxReader(GoldenReader):
    path = "treering._foreign.jax_pytree"
    golden = "jax/0.12"


class OurWriter(Folders, WriterContract):
    path: ClassVar[str]

    def module(self) -> Any:
        return importlib.import_module(self.path)


class TestNpzWriter(OurWriter):
    path = "treering._foreign.write_npz"
    name = "a.npz"

    def read(self, path: Path) -> Mapping[str, Any]:
        with np.load(path) as archive:
            return dict(archive)


class TestSafetensorsWriter(OurWriter):
    path = "treering._checkpoint.save_files"
    name = "a.safetensors"

    def read(self, path: Path) -> Mapping[str, Any]:
        return load_file(path)


class TestHuggingFaceWriter(OurWriter):
    path = "treering._foreign.write_huggingface"

    def read(self, path: Path) -> Mapping[str, Any]:
        return load_file(path / "model.safetensors")


@pytest.mark.parametrize("home", ["_checkpoint.save_msgpack", "_checkpoint.save_folder", "_leaves.serialize"])
def test_the_other_writers_pass(home: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    class Writer(WriterContract):
        name = "a.msgpack" if "msgpack" in home else "written"

        def new_folder(self) -> Path:
            return tmp_path_factory.mktemp("contract")

        def module(self) -> Any:
            return importlib.import_module(f"treering.{home}")

        def read(self, path: Path) -> Mapping[str, Any]:
            return {key: np.asarray(array) for key, array in treering.load(path).items()}

    Writer().test_arrays_are_read_as_they_were_and_stay()
    Writer().test_what_is_no_array_is_written_or_named()
    Writer().test_a_failed_write_leaves_nothing()


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install the example of the page as a distribution."""
    site = tmp_path / "site"
    (site / "tiny-1.0.dist-info").mkdir(parents=True)
    (site / "tiny-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
    (site / "tiny-1.0.dist-info" / "entry_points.txt").write_text(
        "[treering.readers]\ntiny = tiny_format\n[treering.writers]\ntiny = tiny_format\n"
    )
    (site / "tiny_format.py").write_text(example_module())
    monkeypatch.syspath_prepend(str(site))
    yield site
    sys.modules.pop("tiny_format", None)


def test_a_plug_in_reads_and_writes_with_every_verb(plug_in: Path, tmp_path: Path) -> None:
    treering.save(tmp_path / "a", ARRAYS)
    treering.convert(tmp_path / "a", tmp_path / "a.tiny", to="tiny")
    found = treering.load(tmp_path / "a.tiny")
    for key, array in ARRAYS.items():
        np.testing.assert_array_equal(found[key], array)
    listing = treering.inspect(tmp_path / "a.tiny")
    assert listing.form == "tiny"
    assert "format: 1" in str(listing)
    assert treering.verify(tmp_path / "a.tiny").ok
    assert treering.abstract(tmp_path / "a.tiny", only="b")["b"].shape == (2,)
    assert treering.diff(tmp_path / "a", tmp_path / "a.tiny", values=True).differences == ()
    treering.convert(tmp_path / "a.tiny", tmp_path / "b.safetensors")
    np.testing.assert_array_equal(load_file(tmp_path / "b.safetensors")["a"], ARRAYS["a"])
    with pytest.raises(UnsupportedError, match=r"its paths end in '\.tiny'"):
        treering.convert(tmp_path / "a", tmp_path / "a.npz", to="tiny")
    treering.save(tmp_path / "c", {"step": 3})
    with pytest.raises(UnsupportedError, match="leaf 'step': no array"):
        treering.convert(tmp_path / "c", tmp_path / "c.tiny", to="tiny")


def test_the_example_passes_the_contracts(plug_in: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    module = importlib.import_module("tiny_format")

    class Tiny(Folders):
        def __init__(self) -> None:
            self.make = lambda: tmp_path_factory.mktemp("contract")

        def module(self) -> Any:
            return module

    class Reader(Tiny, ReaderContract):
        def make_example(self, folder: Path) -> tuple[Path, Mapping[str, Any]]:
            treering.save(folder / "a", ARRAYS)
            treering.convert(folder / "a", folder / "a.tiny", to="tiny")
            return folder / "a.tiny", ARRAYS

    class Writer(Tiny, WriterContract):
        name = "a.tiny"

        def read(self, path: Path) -> Mapping[str, Any]:
            return dict(treering.load(path))

    for contract in (Reader(), Writer()):
        for name in dir(contract):
            if name.startswith("test_"):
                getattr(contract, name)()


def test_a_plug_in_that_fails_is_named(plug_in: Path, tmp_path: Path) -> None:
    (plug_in / "tiny_format.py").write_text("def recognise(place):\n    return place.nothing\n")
    (tmp_path / "x.unknown").write_bytes(b"some text\n")
    with pytest.raises(UnsupportedError, match="the reader 'tiny', tiny_format, failed at"):
        treering.load(tmp_path / "x.unknown")


def test_nothing_of_ours_looks_for_plug_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> Any:
        raise AssertionError("entry points are looked up")

    jax.devices()  # jax looks for plug-ins of its own when it starts
    monkeypatch.setattr("importlib.metadata.entry_points", refuse)
    treering.save(tmp_path / "a", ARRAYS)
    treering.load(tmp_path / "a")
    treering.convert(tmp_path / "a", tmp_path / "a.npz")
    save_file({"a": ARRAYS["a"]}, tmp_path / "b.safetensors")
    for name in ("a.npz", "b.safetensors"):
        treering.inspect(tmp_path / name)
    assert _detect_file(tmp_path / "a.npz", "a.npz")
    (tmp_path / "x.unknown").write_bytes(b"some text\n")
    with pytest.raises(AssertionError, match="looked up"):
        treering.load(tmp_path / "x.unknown")


def test_without_plug_ins_what_is_unknown_stays_unknown(tmp_path: Path) -> None:
    (tmp_path / "x.unknown").write_bytes(b"some text\n")
    with pytest.raises(FormatError, match="in no form that treering reads"):
        treering.load(tmp_path / "x.unknown")
    treering.save(tmp_path / "a", ARRAYS)
    with pytest.raises(UnsupportedError, match="to='tiny' is not a form that can be written"):
        treering.convert(tmp_path / "a", tmp_path / "a.tiny", to="tiny")
