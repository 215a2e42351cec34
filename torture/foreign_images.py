"""Files and folders in the formats of other programs, as values: to be damaged, written to disk, and kept."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import os
import shutil
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from treering._codec.compression import zstd_compress
from treering._foreign.foreign_tree import FolderFiles
from treering._foreign.ocdbt import MANIFEST, Stretch, read_database
from treering._inspect.inspect import inspect
from treering.errors import TreeringError

__all__ = ["Image", "foreign_seeds", "frame_tensors"]

_GOLDEN = Path(__file__).parents[1] / "tests" / "foreign" / "golden"
_LARGEST = 256 << 10
_REVISION = "0123456789abcdef0123456789abcdef01234567"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What is on disk, by names relative to one folder."""

    place: str
    """What the doors are given."""
    files: Mapping[str, bytes]
    """The content of each file."""
    links: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Where each link leads."""
    holes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Files that are so long, and nothing but a hole behind their content."""
    pipes: tuple[str, ...] = ()
    """Names of pipes, which give no answer."""
    databases: Mapping[str, Mapping[str, bytes]] = dataclasses.field(default_factory=dict)
    """Folder (empty, or with a ``/`` at its end) -> keys and values of its OCDBT database, which has no files yet."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(map(len, self.files.values()))

    def write(self, folder: Path) -> Path:
        """Make the folder anew with all that is in the image; return the path for the doors."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        # What the system has no such name for is left out.
        for name, data in self.files.items():
            with contextlib.suppress(OSError, ValueError):
                _ready(folder / name).write_bytes(data)
        for name, size in self.holes.items():
            with contextlib.suppress(OSError, ValueError):
                os.truncate(_ready(folder / name), size)
        for name, target in self.links.items():
            with contextlib.suppress(OSError, ValueError):
                _ready(folder / name).symlink_to(target)
        for name in self.pipes:
            with contextlib.suppress(OSError, ValueError):
                os.mkfifo(_ready(folder / name))
        return folder / self.place

    def pack(self) -> bytes:
        """Return all of it as a tar archive, which can be unpacked to look at a finding."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for name, data in self.files.items():
                entry = tarfile.TarInfo(_as_text(name))
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
            for name, target in self.links.items():
                entry = tarfile.TarInfo(_as_text(name))
                entry.type, entry.linkname = tarfile.SYMTYPE, _as_text(target)
                archive.addfile(entry)
            for name in self.pipes:
                entry = tarfile.TarInfo(_as_text(name))
                entry.type = tarfile.FIFOTYPE
                archive.addfile(entry)
        return packed.getvalue()


def _as_text(name: str) -> str:
    """Return a name without halves of surrogate pairs and without NUL, which no archive holds."""
    return name.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


def _ready(path: Path) -> Path:
    """Make the folders above a path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


# ---------------------------------------------------------------------------------------------------------------- seeds


@functools.cache
def foreign_seeds() -> Mapping[str, Image]:
    """Return undamaged trees in every foreign format by name: golden files of the tests, and some made here."""
    found = dict(_made())
    for folder in _golden_folders():
        image = _image_of(folder)
        name = str(folder.relative_to(_GOLDEN))
        found[name] = image
        if (taken_apart := _with_databases(image, folder)).databases:
            found[f"{name} taken apart"] = taken_apart
    return found | dict(_levanter(found))


def _levanter(found: Mapping[str, Image]) -> Iterator[tuple[str, Image]]:
    """Yield checkpoints of Levanter with the arrays of Orbax's."""

    def path_of(name: str) -> str:
        leaf, _, file = name.partition("/")
        return f"{leaf.replace('.', '/')}/{file}"

    def mark_of(step: int) -> dict[str, bytes]:
        document = {"step": step, "timestamp": "2025-11-03T12:30:00.123456", "is_temporary": False}
        return {"metadata.json": json.dumps(document).encode()}

    files = {name.removeprefix("it/"): data for name, data in found["orbax/plain_zarr2"].files.items()}
    arrays = {name.partition("/")[0] for name in files if name.endswith("/.zarray")}
    old = {path_of(name): data for name, data in files.items() if name.partition("/")[0] in arrays}
    yield "levanter, old", Image(place="it", files={f"it/{name}": data for name, data in (old | mark_of(7)).items()})
    steps = {f"it/step-{step}/{name}": data for step in (5, 7) for name, data in (old | mark_of(step)).items()}
    yield "levanter, root", Image(place="it", files=steps)
    values = found["orbax/ocdbt_zarr3 taken apart"].databases["it/"]
    database = {path_of(name): data for name, data in values.items()}
    marked = {f"it/{name}": data for name, data in mark_of(7).items()}
    yield "levanter, new", Image(place="it", files=marked, databases={"it/": database})


def _golden_folders() -> Iterator[Path]:
    """Yield the folders that treering reads: those inside of the folder of a program, or else that folder."""
    for program in _folders_in(_GOLDEN):
        yield from list(filter(_is_read, _folders_in(program))) or filter(_is_read, [program])


def _folders_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())


def _is_read(folder: Path) -> bool:
    try:
        inspect(folder)
    except TreeringError:
        return False
    return True


def _image_of(folder: Path) -> Image:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size <= _LARGEST)
    return Image(place="it", files={f"it/{path.relative_to(folder)}": path.read_bytes() for path in paths})


def _with_databases(image: Image, folder: Path) -> Image:
    """Return the image with its OCDBT databases as keys and values, to be written anew."""
    databases: dict[str, dict[str, bytes]] = {}
    for name in image.files:
        where = name.removesuffix(MANIFEST)
        if where == name or "ocdbt.process_" in name:
            continue
        with contextlib.ExitStack() as stack:
            files = FolderFiles(folder / where.removeprefix("it/"), stack)
            databases[where] = {
                key: files.read(*value) if isinstance(value, Stretch) else value
                for key, value in read_database(files).items()
            }
    parts = [f"{where}{part}" for where in databases for part in (MANIFEST, "d/", "ocdbt.process_")]
    rest = {name: data for name, data in image.files.items() if not name.startswith(tuple(parts))}
    return dataclasses.replace(image, files=rest, databases=databases)


def _made() -> Iterator[tuple[str, Image]]:
    arrays: dict[str, Any] = {
        "layers.0.w": np.arange(48, dtype=np.float32).reshape(6, 8),
        "layers.0.b": np.arange(5, dtype=np.int64),
        "norm": np.ones(3, np.float16),
        "empty": np.zeros((0, 4), np.float32),
        "flag": np.array(True),
    }
    for name, save in (("npz", np.savez), ("deflated npz", np.savez_compressed)):
        packed = io.BytesIO()
        save(packed, **arrays, text=np.array("ring"), turned=np.asfortranarray(arrays["layers.0.w"]).astype(">f4"))
        yield name, Image(place="it.npz", files={"it.npz": packed.getvalue()})
    single = io.BytesIO()
    np.save(single, arrays["layers.0.w"])
    yield "npy", Image(place="it.npy", files={"it.npy": single.getvalue()})
    yield from _hugging_face(arrays)
    yield from _zarr_items(arrays["layers.0.w"])


def frame_tensors(header: bytes, data: bytes) -> bytes:
    """Return a safetensors file."""
    return len(header).to_bytes(8, "little") + header + data


def _tensors(arrays: Mapping[str, Any]) -> bytes:
    names = {"float32": "F32", "int64": "I64", "float16": "F16", "bool": "BOOL"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in arrays.items():
        place = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": names[array.dtype.name], "shape": list(array.shape), "data_offsets": place}
        data += array.tobytes()
    return frame_tensors(json.dumps(header).encode(), data)


def _hugging_face(arrays: Mapping[str, Any]) -> Iterator[tuple[str, Image]]:
    whole = _tensors(arrays)
    config = json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}).encode()
    yield "safetensors", Image(place="it.safetensors", files={"it.safetensors": whole})
    yield "hf, one file", Image(place="it", files={"it/model.safetensors": whole, "it/config.json": config})
    parts = [dict(list(arrays.items())[:2]), dict(list(arrays.items())[2:])]
    shards = {f"model-{n}-of-2.safetensors": _tensors(part) for n, part in enumerate(parts, 1)}
    weights = {name: shard for shard, part in zip(shards, parts, strict=True) for name in part}
    index = json.dumps({"metadata": {"total_size": 300}, "weight_map": weights}).encode()
    folder = {**shards, "model.safetensors.index.json": index, "config.json": config}
    yield "hf, shards", Image(place="it", files={f"it/{name}": data for name, data in folder.items()})
    snapshot = f"models--a--b/snapshots/{_REVISION}"
    blobs = {name: f"blobs/{hashlib.sha256(data).hexdigest()}" for name, data in folder.items()}
    yield (
        "hf, snapshot",
        Image(
            place=snapshot,
            files={f"models--a--b/{blobs[name]}": data for name, data in folder.items()},
            links={f"{snapshot}/{name}": f"../../{blob}" for name, blob in blobs.items()},
        ),
    )


def _zarr_items(array: Any) -> Iterator[tuple[str, Image]]:
    """Yield items of Orbax in folders, with codecs that Orbax itself does not write."""
    leaf = {"key_metadata": [{"key": "w", "key_type": 2}], "value_metadata": {"value_type": "np.ndarray"}}
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    packed = {"name": "zstd", "configuration": {"level": 1}}
    inner = {"chunk_shape": [3, 4], "codecs": [little, packed], "index_codecs": [little, {"name": "crc32c"}]}
    chains: dict[str, list[Any]] = {
        "zstd": [little, packed],
        "gzip": [little, {"name": "gzip", "configuration": {"level": 1}}],
        "turned": [{"name": "transpose", "configuration": {"order": [1, 0]}}, little],
        "shards": [{"name": "sharding_indexed", "configuration": inner}],
    }
    items = array.tobytes()
    chunks = {
        "zstd": zstd_compress(memoryview(items), 1),
        "gzip": _gzip(items),
        "turned": array.T.tobytes(),
        "shards": _shard([array[a : a + 3, b : b + 4].tobytes() for a in (0, 3) for b in (0, 4)]),
    }
    for name, codecs in chains.items():
        document = {
            "zarr_format": 3, "node_type": "array", "shape": [6, 8], "data_type": "float32", "fill_value": 0,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [6, 8]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}}, "codecs": codecs,
        }  # fmt: skip
        for sparse in (False, True):
            tree: dict[str, Any] = {"tree_metadata": {"w": leaf}, "use_ocdbt": False, "use_zarr3": True}
            tree["store_array_data_equal_to_fill_value"] = not sparse
            documents = {"it/_METADATA": tree, "it/w/zarr.json": document}
            data = {file: json.dumps(node).encode() for file, node in documents.items()} | {"it/w/c/0/0": chunks[name]}
            yield f"zarr 3, {name}{', sparse' * sparse}", Image(place="it", files=data)


def _gzip(data: bytes) -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    return packer.compress(data) + packer.flush()


def _shard(chunks: list[bytes]) -> bytes:
    from torture.foreign_writers import close_shard

    packed = [zstd_compress(memoryview(chunk), 1) for chunk in chunks]
    starts = [sum(map(len, packed[:n])) for n in range(len(packed))]
    return close_shard(b"".join(packed), [n for pair in zip(starts, map(len, packed), strict=True) for n in pair])
