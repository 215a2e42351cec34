"""Run by test_hostile_memory.py in a fresh process: feed each bomb to every reader in a child, and measure its peak.

    python hostile_memory.py FOLDER

Prints one JSON line for each bomb and reader: the input's size, the growth of the peak, and what came out. The parent
imports everything once; each bomb is made in a child, and read in another that starts as a copy of the clean parent.
"""

from __future__ import annotations

import base64
import gc
import json
import math
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import treering
from tests.checkpoint.documents import Document, document_of, signed, signed_text
from tests.format.indexes import packed_column
from tests.memory import in_child, measured

MIB = 2**20


def _base(folder: Path) -> Document:
    treering.save(folder / "seed", {"a": 1})
    return document_of(folder / "seed")


def _of_nothing(base: Document, structure: list[Any], keys: list[str], **more: Any) -> bytes:
    """An index of leaves that are None."""
    leaves = {"key": keys, "type": [0] * len(keys)}
    types = [{"kind": "none"}]
    members = {"structure": structure, "leaves": leaves, "types": types, "values": [None] * len(keys)}
    return signed(base | members | more)


def _of_arrays(base: Document, count: int, shape: list[int], checksums: int) -> bytes:
    """An index of uint8 arrays, one after the other in one file, and as many checksums."""
    name = f"data-{base['attempt']}-00000-of-00001.safetensors"
    nbytes = math.prod(shape)
    table = base64.b64encode(bytes(8 * checksums)).decode()
    file = {"name": name, "nbytes": 4096 + count * nbytes, "header": 4096, "digest": "xxh3-128:" + "0" * 32}
    chunks = {
        "leaf": list(range(count)),
        "file": [0] * count,
        "offset": [4096 + number * nbytes for number in range(count)],
        "nbytes": [nbytes] * count,
        "block": [1 << 20] * count,
        "box": [None] * count,
        "codec": None,
    }
    return _of_nothing(
        base,
        [{"node": "list", "length": count}, count],
        [str(number) for number in range(count)],
        types=[{"kind": "numpy", "dtype": "uint8", "shape": shape}],
        values=[],
        chunks=chunks,
        checksums={"algorithm": "xxh3-64", "table": table},
        files=[file],
    )


def _packed_empty(base: Document, count: int) -> bytes:
    """A packed index of arrays without items, which take the fewest bytes of it."""
    document = json.loads(_of_arrays(base, 1, [0], 0))
    del document["treering"], document["digest"]
    document["structure"] = {"containers": [{"node": "list", "length": count}], "tokens": packed_column([0, count])}
    document["leaves"] = {"type": packed_column([0] * count)}
    shared = {"leaf": None, "file": 0, "nbytes": 0, "block": 65536, "boxes": [None], "box": 0, "codec": None}
    document["chunks"] = {"offset": packed_column([4096] * count), **shared}
    return signed_text(json.dumps(document)[1:], "4")


def _deep(base: Document, wide: int, *, honest: bool) -> bytes:
    """1,000 levels of long names, and below them leaves whose keys together would take far more than the input."""
    names = ["n" * 1000] * 1000
    structure: list[Any] = [{"node": "dict", "keys": [name]} for name in names]
    structure += [{"node": "list", "length": wide}, wide]
    above = "/".join(names) + "/" if honest else ""
    return _of_nothing(base, structure, [f"{above}{number}" for number in range(wide)])


def _trees(base: Document) -> dict[str, Callable[[], bytes]]:
    many = [str(number) for number in range(100_000)]
    return {
        "a hundred thousand leaves": lambda: _of_nothing(base, [{"node": "list", "length": 100_000}, 100_000], many),
        "a token for each leaf": lambda: _of_nothing(base, [{"node": "list", "length": 100_000}, *[1] * 100_000], many),
        "a million tokens": lambda: _of_nothing(base, [1] * 10**6, ["a"]),
        "a million tokens of nothing": lambda: _of_nothing(base, [[]] * 10**6, ["a"]),
        "a million empty objects": lambda: _of_nothing(base, [{}] * 10**6, ["a"]),
        "empty dicts in a list": lambda: _of_nothing(
            base, [{"node": "list", "length": 60_000}, *[{"node": "dict", "keys": []}] * 60_000], []
        ),
        "dicts of one": lambda: _of_nothing(
            base,
            [{"node": "list", "length": 30_000}, *[{"node": "dict", "keys": ["a"]}, 1] * 30_000],
            [f"{number}/a" for number in range(30_000)],
        ),
        "classes of one": lambda: _of_nothing(
            base,
            [{"node": "list", "length": 10_000}]
            + [
                part
                for number in range(10_000)
                for part in (
                    {"node": "other", "class": f"c{number}", "fields": ["a"], "static": {"s": {"float": "0x1.8p+0"}}},
                    1,
                )
            ],
            [f"{number}/a" for number in range(10_000)],
        ),
        "lists that each claim everything": lambda: _of_nothing(
            base, [{"node": "list", "length": 20_000}] * 20_000, ["a"] * 20_000
        ),
        "levels without end": lambda: _of_nothing(base, [{"node": "list", "length": 1}] * 40_000 + [1], ["0"]),
        "long names on a thousand levels, claimed": lambda: _deep(base, 100_000, honest=False),
        "long names on a thousand levels, held": lambda: _deep(base, 3, honest=True),
        "a key of a megabyte": lambda: _of_nothing(base, [{"node": "dict", "keys": ["k" * MIB]}, 1], ["k" * MIB]),
        "keys of tuples": lambda: _of_nothing(
            base,
            [{"node": "dict", "keys": [{"tuple": [{"int": str(n)}, {"none": None}]} for n in range(20_000)]}, 20_000],
            [f"({n}, None)" for n in range(20_000)],
        ),
        "a tuple without end": lambda: _of_nothing(
            base, [{"node": "dict", "keys": [json.loads('{"tuple":[' * 200 + "]}" * 200)]}, 1], ["a"]
        ),
        "a static of a million": lambda: _of_nothing(
            base,
            [{"node": "other", "class": "c", "fields": ["a"], "static": {"s": {"tuple": ["x"] * 10**6}}}, 1],
            ["a"],
        ),
    }


def _texts(base: Document) -> dict[str, Callable[[], bytes]]:
    del base
    return {
        "lists without end": lambda: signed_text('"a": ' + "[" * 4 * MIB),
        "objects without end": lambda: signed_text('"a": ' + '{"a":' * MIB),
        "small lists": lambda: signed_text('"a": [' + "[]," * MIB + "0]}"),
        "small objects": lambda: signed_text('"a": [' + "{}," * MIB + "0]}"),
        "objects of one": lambda: signed_text('"a": [' + '{"":0},' * MIB + "0]}"),
        "small numbers": lambda: signed_text('"a": [' + "0," * MIB + "0]}"),
        "large numbers": lambda: signed_text('"a": [' + "123456789," * MIB + "0]}"),
        "floats": lambda: signed_text('"a": [' + "0.5," * MIB + "0]}"),
        "texts": lambda: signed_text('"a": [' + '"",' * MIB + "0]}"),
        "distinct texts": lambda: signed_text('"a": [' + "".join(f'"{n:x}",' for n in range(MIB)) + "0]}"),
        "distinct members": lambda: signed_text("".join(f'"{n:x}":0,' for n in range(MIB)) + '"a":0}'),
        "a number of a megabyte": lambda: signed_text('"a": ' + "9" * MIB + "}"),
        "a float of a megabyte": lambda: signed_text('"a": 0.' + "9" * MIB + "}"),
        "a text of four megabytes": lambda: signed_text('"a": "' + "\\u0041" * MIB + '"}'),
    }


def _claims(base: Document) -> dict[str, Callable[[], bytes]]:
    return {
        "one array of 2 GiB": lambda: _of_arrays(base, 1, [2 << 30], 2048),
        "one array of 4 EiB": lambda: _of_arrays(base, 1, [2**62], 1),
        "a shape of 2**62 items of no bytes": lambda: _of_arrays(base, 1, [0, 2**62], 0),
        "a header of 2 GiB": lambda: signed(
            document_with(
                base,
                lambda document: document["files"].append(
                    {
                        "name": f"data-{base['attempt']}-00000-of-00001.safetensors",
                        "nbytes": 2 << 30,
                        "header": 2 << 30,
                        "digest": "xxh3-128:" + "0" * 32,
                    }
                ),
            )
        ),
        "a list of 2**40": lambda: _of_nothing(base, [{"node": "list", "length": 1 << 40}, 1], ["a"]),
        "2**40 leaves": lambda: _of_nothing(base, [{"node": "list", "length": 1}, 1 << 40], ["0"]),
    }


def document_with(base: Document, change: Callable[[Document], None]) -> Document:
    """A changed copy."""
    document: Document = json.loads(json.dumps(base))
    change(document)
    return document


def _arrays(base: Document) -> dict[str, Callable[[], bytes]]:
    def boxes(count: int) -> bytes:
        document = json.loads(_of_arrays(base, 1, [count], 0))
        del document["treering"], document["digest"]
        columns = document["chunks"]
        columns |= {name: [columns[name][0]] * count for name in ("leaf", "file", "block")}
        columns |= {"nbytes": [1] * count, "offset": list(range(4096, 4096 + count))}
        columns["box"] = [[[n, n + 1]] for n in range(count)]
        document["checksums"]["table"] = base64.b64encode(bytes(8 * count)).decode()
        return signed(document)

    return {
        "many arrays": lambda: _of_arrays(base, 50_000, [1], 50_000),
        "many empty arrays in packed columns": lambda: _packed_empty(base, 250_000),
        "many empty arrays": lambda: _of_arrays(base, 50_000, [0], 0),
        "an array in fifty thousand parts": lambda: boxes(50_000),
        "checksums of nothing": lambda: _of_arrays(base, 1, [1], MIB),
        "a shape of a million axes": lambda: _of_arrays(base, 1, [1] * 10**6, 1),
    }


def _headers(base: Document) -> dict[str, Callable[[], bytes]]:
    """Safetensors files."""
    del base

    def file(header: bytes, data: bytes = b"") -> bytes:
        return struct.pack("<Q", len(header)) + header + data

    entry = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    return {
        "safetensors: a header of 2**63": lambda: struct.pack("<Q", 2**63) + b"{}" + bytes(100),
        "safetensors: a header of 99 MB in a small file": lambda: struct.pack("<Q", 99_000_000) + b"{}" + bytes(100),
        "safetensors: many empty arrays": lambda: file(
            ("{" + ",".join(f'"{n:x}":{entry}' for n in range(30_000)) + "}").encode()
        ),
        "safetensors: an array of 4 EiB": lambda: file(
            json.dumps({"a": {"dtype": "U8", "shape": [2**62], "data_offsets": [0, 2**62]}}).encode()
        ),
        "safetensors: a million axes": lambda: file(
            json.dumps({"a": {"dtype": "U8", "shape": [1] * 10**6, "data_offsets": [0, 1]}}).encode(), b"x"
        ),
        "safetensors: lists without end": lambda: file(b'{"a":' + b"[" * MIB),
        "safetensors: spaces": lambda: file(b"{}" + b" " * 4 * MIB),
        "safetensors: a message of four megabytes": lambda: file(
            json.dumps({"__metadata__": {"note": "x" * 4 * MIB}}).encode()
        ),
        "safetensors: many notes": lambda: file(
            json.dumps({"__metadata__": {f"{n:x}": "" for n in range(100_000)}}).encode()
        ),
    }


def bombs(base: Document) -> dict[str, Callable[[], bytes]]:
    """Inputs of up to some megabytes that claim or make far more than they are."""
    return _trees(base) | _texts(base) | _claims(base) | _arrays(base) | _headers(base)


def claims(base: Document) -> set[str]:
    """Those that have to cost next to nothing."""
    return {*_claims(base), "safetensors: a header of 2**63", "safetensors: a header of 99 MB in a small file"}


def _placed(name: str, data: bytes, folder: Path) -> Path:
    if name.startswith("safetensors"):
        path = folder / "bomb.safetensors"
        path.write_bytes(data)
        return path
    path = folder / "bomb"
    path.mkdir(exist_ok=True)
    (path / "treering.json").write_bytes(data)
    return path


def main() -> None:
    """Feed every bomb to the readers."""
    folder = Path(sys.argv[1])
    base = _base(folder)
    readers = (treering.load, treering.inspect, treering.verify)
    for read in readers:  # so that lazy imports are not counted as the first bomb's
        read(folder / "seed")
    shutil.rmtree(folder / "seed")
    gc.collect()
    gc.freeze()
    cheap = claims(base)
    texts = _texts(base)
    for name, make in bombs(base).items():

        def place(name: str = name, make: Callable[[], bytes] = make) -> dict[str, Any]:
            data = make()
            return {"size": len(data), "path": str(_placed(name, data, folder))}

        made = in_child(place)
        for read in readers[:1] if name in texts else readers:  # all of them parse alike
            told = in_child(lambda read=read, path=made["path"]: measured(lambda: read(path)))  # type: ignore[misc]
            line = {"name": name, "reader": read.__name__, "claim": name in cheap, "size": made["size"], **told}
            sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
