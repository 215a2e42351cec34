"""Writers of foreign formats that lie in some of their numbers, and compute every length and digest around the lies."""

from __future__ import annotations

import itertools
import random
import struct
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence

from treering._codec.compression import zstd_compress
from treering._values.checksums import crc32c

__all__ = ["Liar", "close_shard", "write_database", "write_zip"]

_NUMBERS = (0, 1, 2, 127, 128, 255, 2**15, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)
_MANIFEST_MAGIC = 0x0CDB3A2A
_NODE_MAGIC = 0x0CDB20DE
_HEX = b"0123456789abcdef" * 2
_NODES = b"d/" + _HEX
_VALUES = b"ocdbt.process_0/d/" + _HEX[::-1]
_PATHS = (b"../d/" + _HEX, b"/etc/passwd", b"d/../../outside/" + _HEX, b"d/" + _HEX + b"/..", b"", b"d/\xff", b"d/x")


class Liar:
    """Gives numbers back as they are, or other ones.

    Args:
        source: of all choices.
        rate: how often a number is another one.
    """

    def __init__(self, source: random.Random, rate: float) -> None:
        self.source = source
        self._rate = rate

    def lies(self) -> bool:
        """Tell whether to lie now."""
        return self.source.random() < self._rate

    def __call__(self, number: int, bits: int = 64) -> int:
        """Return a number of so many bits."""
        if not self.lies():
            return number
        near = (number - 1, number + 1, number * 2)
        return self.source.choice((*near, self.source.choice(_NUMBERS))) % 2**bits


def close_shard(data: bytes, numbers: Sequence[int]) -> bytes:
    """Return a shard of zarr 3: its chunks, and behind them the index with its checksum."""
    index = array("Q", numbers).tobytes()
    return data + index + crc32c(index).to_bytes(4, "little")


# ------------------------------------------------------------------------------------------------------------------ zip


def write_zip(entries: Iterable[tuple[bytes, bytes, int]], liar: Liar) -> bytes:
    """Return an archive of entries, each a name, the content, and 0 for stored or 8 for deflated."""
    body, directory, count = b"", b"", 0
    for name, content, method in entries:
        packer = zlib.compressobj(6, zlib.DEFLATED, -15)
        packed = packer.compress(content) + packer.flush() if method == 8 else content
        flags = liar.source.choice((1, 8, 0x800)) if liar.lies() else 0
        middle = struct.pack("<HHHHL", flags, liar(method, 16), 0, 0, liar(zlib.crc32(content), 32))
        sizes, offset = [liar(len(packed)), liar(len(content))], liar(len(body))
        extra = b""
        if max(*sizes, offset) >= 2**32 - 1:
            extra = struct.pack("<HHQQQ", 1, liar(24, 16), sizes[1], sizes[0], offset)
            sizes, offset = [2**32 - 1] * 2, 2**32 - 1
        lengths = struct.pack("<LLHH", *sizes, liar(len(name), 16), liar(len(extra), 16))
        directory += b"PK\1\2\x14\0\x14\0" + middle + lengths + bytes(10) + struct.pack("<L", offset) + name + extra
        lengths = struct.pack("<LLHH", len(packed), len(content), liar(len(name), 16), 0)
        body += b"PK\3\4\x14\0" + middle + lengths + name + packed
        count += 1
    counts, start = [liar(count, 16)] * 2, liar(len(body), 32)
    end = struct.pack("<4sHHHHLLH", b"PK\5\6", 0, 0, *counts, liar(len(directory), 32), start, 0)
    return body + directory + end


# ---------------------------------------------------------------------------------------------------------------- OCDBT


def write_database(values: Mapping[str, bytes], liar: Liar) -> dict[str, bytes]:
    """Return the files of an OCDBT database by their names: a tree of two levels, or of one."""
    return _Writer(liar).write({key.encode("utf-8", "surrogatepass"): value for key, value in values.items()})


class _Writer:
    def __init__(self, liar: Liar) -> None:
        self._liar = liar
        self._nodes = bytearray()
        self._values = bytearray()
        self._inline = liar.source.choice((0, 100, 1024))

    def write(self, values: Mapping[bytes, bytes]) -> dict[str, bytes]:
        liar, source = self._liar, self._liar.source
        keys = sorted(values)
        if keys and liar.lies():
            keys.insert(source.randrange(len(keys)), source.choice(keys))
        step = source.choice((1, 3, 1000))
        groups = [keys[start : start + step] for start in range(0, len(keys), step)] or [[]]
        below = [self._leaf(group, values, shared=len(groups) > 1) for group in groups]
        height = 0
        if len(below) > 1:
            below, height = [self._interior(groups, below)], 1
        (offset, length) = below[0]
        config = bytes(16) + self._varints(0, 1024, 100_000_000) + bytes([liar(4, 8)]) + self._varints(0)
        root = self._varints(1, 1) + bytes([liar(height, 8)]) + self._varints(0, offset, length, len(keys), length, 0)
        body = config + self._table() + root + bytes(8) + self._varints(0)
        return {
            "manifest.ocdbt": self._framed(_MANIFEST_MAGIC, body),
            _NODES.decode(): bytes(self._nodes),
            _VALUES.decode(): bytes(self._values),
        }

    def _leaf(self, keys: Sequence[bytes], values: Mapping[bytes, bytes], *, shared: bool) -> tuple[int, int]:
        prefix = len(_common(keys)) if shared else 0
        far = [len(values[key]) > self._inline for key in keys]
        offsets = []
        for key in (key for key, is_far in zip(keys, far, strict=True) if is_far):
            offsets.append(len(self._values))
            self._values += values[key]
        inline = b"".join(values[key] for key, is_far in zip(keys, far, strict=True) if not is_far)
        kinds = bytes(self._liar(is_far, 8) for is_far in far)
        rows = self._varints(*(len(values[key]) for key in keys)) + kinds
        rows += self._varints(*[1] * len(offsets), *offsets) + inline
        return self._node(0, self._names([key[prefix:] for key in keys]) + rows)

    def _interior(self, groups: Sequence[Sequence[bytes]], below: Sequence[tuple[int, int]]) -> tuple[int, int]:
        firsts = [group[0] for group in groups]
        common = [len(_common(group)) for group in groups]
        count = len(below)
        places = [0] * count, [offset for offset, _ in below], [length for _, length in below], [1] * (3 * count)
        rows = self._varints(*(number for column in places for number in column))
        return self._node(1, self._names(firsts, common) + rows)

    def _names(self, names: Sequence[bytes], common: Sequence[int] = ()) -> bytes:
        shared = [len(_common(pair)) for pair in itertools.pairwise(names)]
        own = [len(name) - same for name, same in zip(names, [0, *shared], strict=True)]
        texts = b"".join(name[len(name) - more :] if more else b"" for name, more in zip(names, own, strict=True))
        return self._varints(len(names), *shared, *own, *common) + texts

    def _table(self) -> bytes:
        paths = [self._liar.source.choice(_PATHS) if self._liar.lies() else path for path in (_NODES, _VALUES)]
        return self._varints(2, 0, *map(len, paths), 0, 0) + b"".join(paths)

    def _node(self, height: int, rows: bytes) -> tuple[int, int]:
        body = bytes([self._liar(height, 8)]) + self._table() + rows
        start = len(self._nodes)
        self._nodes += self._framed(_NODE_MAGIC, body)
        return start, len(self._nodes) - start

    def _framed(self, magic: int, body: bytes) -> bytes:
        source = self._liar.source
        if self._liar.lies():
            at = source.randrange(len(body) + 1)
            body = source.choice((body[:at], body[:at] + source.randbytes(1) + body[at + 1 :], body + bytes(1 << 20)))
        method = source.choice((0, 1))
        packed = zstd_compress(memoryview(body), 1) if method else body
        head = self._varints(0) + bytes([self._liar(method, 7)])
        length = self._liar(12 + len(head) + len(packed) + 4)
        data = magic.to_bytes(4, "big") + length.to_bytes(8, "little") + head + packed
        return data + crc32c(data).to_bytes(4, "little")

    def _varints(self, *numbers: int) -> bytes:
        return b"".join(_varint(self._liar(number)) for number in numbers)


def _common(names: Sequence[bytes]) -> bytes:
    """Return the bytes that all names begin with."""
    first, last = min(names, default=b""), max(names, default=b"")
    pairs = zip(first, last, strict=False)
    return first[: next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(last)))]


def _varint(number: int) -> bytes:
    data = bytearray()
    while number > 127:
        data.append(number & 127 | 128)
        number >>= 7
    return bytes([*data, number])
