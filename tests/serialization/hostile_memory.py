"""Run by test_hostile_memory.py in a fresh process: feed each bomb to a reader in a child, and measure its peak.

    python hostile_memory.py FOLDER

Prints one JSON line for each bomb: its name, the reader, the input's size, the growth of the peak, and what came out.
The parent imports everything once and makes nothing itself; each bomb is made in a child, and read in another that
starts as a copy of the clean parent. So the peak is the reader's, and no memory that was free before hides any.
"""

from __future__ import annotations

import gc
import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.memory import in_child, measured
from treering import serialization

MIB = 2**20


def _packed_text(text: str) -> bytes:
    raw = text.encode()
    return bytes([0xA0 | len(raw)]) + raw


def _tiny_array(dims: bytes = b"\x91\x00", buffer: bytes = b"\xc4\x00") -> bytes:
    payload = b"\x93" + dims + _packed_text("int8") + buffer
    return b"\xc7" + bytes([len(payload)]) + b"\x01" + payload


def _tuple(payload: bytes) -> bytes:
    return b"\xc9" + struct.pack(">I", len(payload)) + b"\x04" + payload


def _nested_tuples(depth: int) -> bytes:
    heads, size = [], 1
    for _ in range(depth):
        size += 1
        heads.append(b"\xc9" + struct.pack(">I", size) + b"\x04\x91")
        size += 6
    return b"".join(reversed(heads)) + b"\x07"


def _list(item: bytes, size: int = MIB) -> bytes:
    """A flat list of as many ``item`` as fill ``size`` bytes."""
    count = size // len(item)
    return b"\xdd" + struct.pack(">I", count) + item * count


def _nests() -> dict[str, Callable[[], bytes]]:
    return {
        "nested maps with a text key": lambda: b"\x81\xa0" * MIB + b"\xc0",
        "nested maps with an int key": lambda: b"\x81\x00" * MIB + b"\xc0",
        "nested maps, never closed": lambda: b"\x81\xa0" * MIB,
        "nested lists": lambda: b"\x91" * (4 * MIB) + b"\xc0",
        "nested lists, never closed": lambda: b"\x91" * MIB,
        "nested tuples": lambda: _nested_tuples(130_000),
        "array16 headers that all fit": lambda: b"\xdc\xff\xff" * MIB,
    }


def _crowds() -> dict[str, Callable[[], bytes]]:
    return {
        "empty maps in a list": lambda: _list(b"\x80", 2 * MIB),
        "empty lists in a list": lambda: _list(b"\x90"),
        "one-entry maps with int keys": lambda: _list(b"\x81\x00\x00"),
        "one-entry maps with distinct text": lambda: (
            b"\xdd\x00\x03\x00\x00" + b"".join(b"\x81\xa6%06d\x00" % n for n in range(0x30000))
        ),
        "deep, then wide": lambda: b"\x81\xa1a" * 100_000 + _list(b"\x91\x00"),
        "lists of one": lambda: _list(b"\x91\x00"),
        "empty tuples": lambda: _list(b"\xd4\x04\x90"),
        "tiny arrays": lambda: _list(_tiny_array()),
        "tiny arrays of high rank": lambda: _list(_tiny_array(b"\xdc\x00\x40" + b"\x00" * 64)),
        "tiny scalars": lambda: _list(_tiny_array(b"\x90", b"\xc4\x01\x00").replace(b"\x01\x93", b"\x03\x93", 1)),
        "small ints": lambda: _list(b"\x00"),
        "empty texts": lambda: _list(b"\xa0"),
        "texts of one emoji": lambda: _list(b"\xa4\xf0\x9f\x8c\xb2"),
        "complex numbers": lambda: _list(b"\xc7\x13\x02\x92" + (b"\xcb" + bytes(8)) * 2),
        "timestamps": lambda: _list(b"\xd6\xff" + bytes(4)),
        "one wide map": lambda: (
            b"\xdf\x00\x03\x00\x00" + b"".join(b"\xce" + struct.pack(">I", n + 2**31) + b"\x00" for n in range(0x30000))
        ),
        "huge empty shapes": lambda: _list(_tiny_array(b"\x92\x00\xcf\x00\x00\x00\xff\xff\xff\xff\xff")),
    }


def _claims() -> dict[str, Callable[[], bytes]]:
    huge = b"\x92" + b"\xcf\x00\x00\x00\xff\xff\xff\xff\xff" * 2
    return {
        "an array header of 4 G items": lambda: b"\xdd\xff\xff\xff\xff" + bytes(MIB),
        "a map header of 4 G pairs": lambda: b"\xdf\xff\xff\xff\xff" + bytes(MIB),
        "many array headers of 4 G items": lambda: b"\xdd\xff\xff\xff\xff" * (MIB // 5),
        "a bin header of 4 GiB": lambda: b"\xc6\xff\xff\xff\xff" + bytes(MIB),
        "a text header of 4 GiB": lambda: b"\xdb\xff\xff\xff\xff" + bytes(MIB),
        "an ext header of 4 GiB": lambda: b"\xc9\xff\xff\xff\xff\x01" + bytes(MIB),
        "an array of a huge shape": lambda: _list(_tiny_array(huge)),
        "an array of a terabyte": lambda: _list(_tiny_array(b"\x91\xcf\x00\x00\x01\x00\x00\x00\x00\x00")),
    }


def _oddities() -> dict[str, Callable[[], bytes]]:
    marker = b"\x83" + b"\xb9__msgpack_chunked_array__\xc3" + _packed_text("shape")
    parts = _packed_text("chunks")

    def numbered(count: int, value: bytes) -> bytes:
        return b"\xdf" + struct.pack(">I", count) + b"".join(_packed_text(str(n)) + value for n in range(count))

    return {
        "tiny chunked arrays": lambda: _list(marker + b"\x81\xa10\x00" + parts + b"\x81\xa10" + _tiny_array()),
        "a chunked array of rank 100,000": lambda: (
            marker + numbered(100_000, b"\x01") + parts + b"\x81\xa10" + _tiny_array(b"\x91\x01", b"\xc4\x01a")
        ),
        "a chunked array of 50,000 chunks": lambda: marker + b"\x81\xa10\x00" + parts + numbered(50_000, _tiny_array()),
        "a dtype name of a megabyte": lambda: (
            b"\xc9"
            + struct.pack(">I", MIB + 10)
            + b"\x01\x93\x91\x00\xdb"
            + struct.pack(">I", MIB)
            + b"a" * MIB
            + b"\xc4\x00"
        ),
        "a key of a megabyte, twice": lambda: b"\x82" + (b"\xdb" + struct.pack(">I", MIB) + b"a" * MIB + b"\x00") * 2,
        "a shape of a million dims": lambda: (
            b"\xc9"
            + struct.pack(">I", MIB + 13)
            + b"\x01\x93\xdd"
            + struct.pack(">I", MIB)
            + b"\x01" * MIB
            + b"\xa4int8\xc4\x01a"[:7]
        ),
    }


CLAIMS = tuple(_claims())
BOMBS: dict[str, Callable[[], bytes]] = _nests() | _crowds() | _claims() | _oddities()
"""Inputs of 1 to 4 MB that claim or make far more than they are."""


def _made(name: str, path: Path) -> dict[str, Any]:
    return {"size": path.write_bytes(BOMBS[name]())}


def _restored(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return measured(lambda: serialization.msgpack_restore(data))


def _loaded(path: Path) -> dict[str, Any]:
    return measured(lambda: serialization.load_from_file(None, path))


def main() -> None:
    """Feed every bomb to both readers; the crowds, which take time, to one."""
    path = Path(sys.argv[1]) / "bomb"
    # A warm-up, so that lazy imports are not counted as the first bomb's.
    path.write_bytes(b"\x81\xa1a" + _tiny_array())
    _restored(path)
    _loaded(path)
    gc.collect()
    gc.freeze()
    crowds = _crowds()
    for name in BOMBS:
        made = in_child(lambda name=name: _made(name, path))  # type: ignore[misc]
        for reader in (_restored, _loaded):
            if reader is _restored or name not in crowds:
                told = in_child(lambda reader=reader: reader(path))  # type: ignore[misc]
                sys.stdout.write(json.dumps({"name": name, "reader": reader.__name__, **made, **told}) + "\n")


if __name__ == "__main__":
    main()
