"""A reader of leaves directories made from docs/spec/leaves.md alone: json, numpy, xxhash and zstandard, no treering.

``read(folder, prefix)`` returns the tree and the leaves by key. Arrays of dtypes that numpy lacks come as unsigned ints
of the same size; classes come as dicts of their fields. Trees and values are those of checkpoints, so their reader is
used for them.
"""

import base64
import itertools
import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard

from tests.compat.independent_reader import build, digest, value

HEAD = b'{"treering leaves": 1, "digest": "'
DIGEST_CHARACTERS = len("xxh3-128:") + 32
CODES = {"bool": "|b1", "complex64": "<c8", "complex128": "<c16", "float16": "<f2", "float32": "<f4", "float64": "<f8"}
CODES |= {f"{kind}{8 * n}": f"{'|<'[n > 1]}{kind[0]}{n}" for kind in ("int", "uint") for n in (1, 2, 4, 8)}
NAMED = ["bfloat16", "float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"]
NAMED += ["float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "int2", "int4"]
UNSAFE = r"./\\:\x00-\x1f\x7f-\x9f\ud800-\udfff"


def read_record(text: str) -> dict[str, Any]:
    data, end = text.encode("ascii"), len(HEAD) + DIGEST_CHARACTERS
    assert data.startswith(HEAD), "not a record of version 1"
    assert data[len(HEAD) : end].decode() == digest(data[: len(HEAD)], data[end:]), "the record is damaged"
    return json.loads(data)


def folder_name(part: str) -> str:
    """Return one part of a key as the name of a folder."""
    if not re.search(f"[{UNSAFE}]|%(-|[0-9A-F]{{2}})", part):
        return part or "%-"
    escape = lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode("utf-8", "surrogatepass"))  # noqa: E731
    return re.sub(f"[{UNSAFE}%]", escape, part)


def folder_of(prefix: str | None, key: str) -> str:
    above = prefix.replace(".", "/").split("/") if prefix else []
    key = re.sub("~u([0-9a-f]{4})", lambda found: chr(int(found[1], 16)), key)
    parts = [] if not key else [""] if key == "~" else key.split("/")
    return "/".join(above + [folder_name(part.replace("~1", "/").replace("~0", "~")) for part in parts]) or "%-"


def stored_as(dtype: str) -> tuple[str, str, np.dtype]:
    """Return what the index calls the items of a dtype, what ``.zarray`` does, and what numpy reads them as."""
    if dtype in CODES:
        return dtype, CODES[dtype], np.dtype(CODES[dtype])
    size = 2 if dtype == "bfloat16" else 8 if dtype.startswith(("datetime64", "timedelta64")) else 1
    raw = f"uint{8 * size}"
    return (dtype, dtype, np.dtype(CODES[raw])) if dtype in NAMED else (raw, CODES[raw], np.dtype(CODES[raw]))


class Files:
    """The files of one save, looked for where the index says that they are, and their checksums in turn."""

    def __init__(self, folder: Path, record: dict[str, Any], *, moving: bool) -> None:
        staged = folder / ".treering" / record["attempt"] / "leaves"
        self.places = [staged, folder] if moving else [folder, staged]
        self.attempt = record["attempt"]
        assert record["checksums"]["algorithm"] == "xxh3-64"
        table = base64.b64decode(record["checksums"]["table"])
        self.sums, self.sizes = struct.iter_unpack("<Q", table), iter(record["sizes"])

    def file(self, name: str) -> bytes:
        found = [place / name for place in self.places if (place / name).is_file()]
        assert found, f"{name} is missing"
        return found[0].read_bytes()

    def chunk(self, name: str, size: int) -> bytes:
        data = self.file(name)
        assert len(data) == size, f"{name} is cut short or too long"
        block = min(max((1 << (size // 256).bit_length()) // 2, 1 << 16), 1 << 20)
        for at in range(0, size, block):
            assert next(self.sums) == (xxhash.xxh3_64_intdigest(data[at : at + block]),), f"{name} is damaged"
        return data

    def array(self, folder: str, kind: dict[str, Any], layout: dict[str, Any]) -> np.ndarray:
        shape, chunks, compressor = kind["shape"], layout["chunks"], layout["compressor"]
        _, code, dtype = stored_as(kind["dtype"])
        wanted = {"zarr_format": 2, "shape": shape, "chunks": chunks, "dtype": code, "compressor": compressor}
        wanted |= {"fill_value": None, "filters": None, "order": "C", "dimension_separator": "."}
        text = json.dumps(wanted | {"treering": self.attempt}, sort_keys=True, separators=(",", ":"))
        assert self.file(f"{folder}/.zarray") == text.encode(), "the .zarray is not that of the record"
        array, nbytes = np.zeros(shape, dtype), math.prod(chunks) * dtype.itemsize
        for place in itertools.product(*(range(-(-n // c)) for n, c in zip(shape, chunks, strict=True))):
            name = f"{folder}/{'.'.join(map(str, place)) or '0'}"
            data = self.chunk(name, nbytes if compressor is None else next(self.sizes))
            if compressor is not None:
                assert compressor["id"] == "zstd", "a codec that this reader does not have"
                data = zstandard.ZstdDecompressor().decompress(data, max_output_size=nbytes)
            part = np.frombuffer(data, dtype).reshape(chunks)
            box = tuple(slice(p * c, min((p + 1) * c, n)) for p, c, n in zip(place, chunks, shape, strict=True))
            array[box] = part[tuple(slice(side.stop - side.start) for side in box)]
        return array


def read(folder: Path, prefix: str | None = None) -> tuple[Any, dict[str, Any]]:
    index = json.loads((folder / "tensorstore_index.json").read_text())
    assert index["format"] == "tensorstore"
    ours = index["treering"][prefix or ""]
    record = read_record(ours["record"])
    assert record["prefix"] == prefix, "the record of another branch"
    if "moving" in ours:
        listed = [b"\0" + name.encode() for name in ours["moving"]["cleared"]]
        assert ours["moving"]["digest"] == digest(ours["record"].encode(), *listed), "the index is damaged"
    files = Files(folder, record, moving="moving" in ours)
    entries, leaves = [], []
    values, layouts = iter(record["values"]), iter(record["layout"])
    for key, of in zip(record["leaves"]["key"], record["leaves"]["type"], strict=True):
        kind = record["types"][of]
        if "dtype" not in kind:
            leaves.append(value(kind["kind"], next(values)))
            continue
        where = folder_of(prefix, key)
        data = files.array(where, kind, record["layouts"][next(layouts)])
        into = {"str": lambda raw: raw.decode("utf-8", "surrogatepass"), "bytes": bytes, "bytearray": bytearray}
        if kind["kind"] in into:
            data = into[kind["kind"]](data.tobytes())
        else:
            entries.append({"path": where, "shape": kind["shape"], "dtype": stored_as(kind["dtype"])[0]})
        leaves.append(data)
    assert entries == (index["prefixes"][prefix] if prefix else index["arrays"]), "the list is not that of the record"
    assert next(files.sums, None) is next(files.sizes, None) is next(layouts, None) is None
    return build(record["structure"], leaves)[0], dict(zip(record["leaves"]["key"], leaves, strict=True))
