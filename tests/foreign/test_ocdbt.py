"""OCDBT databases that TensorStore wrote, and ones that nobody should have written."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tensorstore

from treering._foreign.foreign_tree import FolderFiles
from treering._foreign.ocdbt import Stretch, Value, read_database
from treering._values.checksums import crc32c
from treering.errors import CorruptError, NotFoundError, TreeringError, UnsupportedError

_HEX = "0123456789abcdef" * 2


def _write(place: Path, items: Mapping[str, bytes], **config: Any) -> None:
    spec = {"driver": "ocdbt", "base": f"file://{place}/", "config": config}
    store = tensorstore.KvStore.open(spec).result()
    with tensorstore.Transaction() as transaction:
        for key, value in items.items():
            store.with_transaction(transaction)[key] = value


def _read(place: Path) -> dict[str, bytes]:
    def value_of(value: Value) -> bytes:
        return files.read(*value) if isinstance(value, Stretch) else value

    with contextlib.ExitStack() as stack:
        files = FolderFiles(place, stack)
        return {key: value_of(value) for key, value in read_database(files).items()}


def _varint(number: int) -> bytes:
    data = bytearray()
    while number > 127:
        data.append(number & 127 | 128)
        number >>= 7
    return bytes([*data, number])


def _varints(*numbers: int) -> bytes:
    return b"".join(map(_varint, numbers))


def _framed(magic: int, body: bytes, *, version: int = 0, compression: int = 0) -> bytes:
    start = magic.to_bytes(4, "big") + (len(body) + 18).to_bytes(8, "little") + bytes([version, compression]) + body
    return start + crc32c(start).to_bytes(4, "little")


def _manifest(node: bytes, *, path: bytes = f"d/{_HEX}".encode(), height: int = 0, offset: int = 0) -> bytes:
    config = bytes(17) + _varints(100, 1 << 20) + bytes([4, 0])
    table = _varints(1, len(path), 0) + path
    root = _varints(1, 1) + bytes([height]) + _varints(0, offset, len(node), 1, len(node), 0)
    return _framed(0x0CDB3A2A, config + table + root + bytes(8) + _varint(0))


def _leaf(keys: Sequence[bytes], values: Sequence[bytes]) -> bytes:
    own = _varints(*[0] * (len(keys) - 1), *map(len, keys)) + b"".join(keys)
    body = b"\0\0" + _varint(len(keys)) + own + _varints(*map(len, values)) + bytes(len(keys)) + b"".join(values)
    return _framed(0x0CDB20DE, body)


def _place(folder: Path, node: bytes, manifest: bytes) -> Path:
    (folder / "d").mkdir(parents=True)
    (folder / "d" / _HEX).write_bytes(node)
    (folder / "manifest.ocdbt").write_bytes(manifest)
    return folder


@pytest.mark.parametrize("compression", [None, {"id": "zstd"}])
def test_what_tensorstore_wrote(tmp_path: Path, compression: Any) -> None:
    items = {f"layer.{number}/{'wb'[number % 2]}": bytes([number % 251]) * (number % 40) for number in range(800)}
    _write(tmp_path, items, max_decoded_node_bytes=2000, max_inline_value_bytes=20, compression=compression)
    found = _read(tmp_path)
    assert found == items
    assert list(found) == sorted(items)


def test_the_latest_version_counts_and_an_empty_one_is_empty(tmp_path: Path) -> None:
    _write(tmp_path, {"a": b"1", "b": b"2"})
    _write(tmp_path, {"a": b"3"})
    assert _read(tmp_path) == {"a": b"3", "b": b"2"}
    store = tensorstore.KvStore.open(f"file://{tmp_path}/|ocdbt:").result()
    store.delete_range(tensorstore.KvStore.KeyRange()).result()
    assert _read(tmp_path) == {}


def test_a_folder_without_a_manifest_is_no_database(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"manifest\.ocdbt"):
        _read(tmp_path)


def test_every_flip_and_every_cut_is_seen(tmp_path: Path) -> None:
    node = _leaf([b"a", b"b"], [b"x", b"yz"])
    _place(tmp_path, node, _manifest(node))
    assert _read(tmp_path) == {"a": b"x", "b": b"yz"}
    for file in (tmp_path / "manifest.ocdbt", tmp_path / "d" / _HEX):
        data = file.read_bytes()
        for at in range(len(data)):
            for damaged in (data[:at], data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]):
                file.write_bytes(damaged)
                with pytest.raises((CorruptError, UnsupportedError)):
                    _read(tmp_path)
        file.write_bytes(data)


def test_a_node_with_any_byte_changed_and_a_new_checksum_is_read_or_refused(tmp_path: Path) -> None:
    node = _leaf([b"a", b"bc"], [b"x", b"yz"])
    _place(tmp_path, node, _manifest(node))
    body = node[14:-4]
    refused = 0
    for at in range(len(body)):
        for value in (0, 1, 127, 128, 255):
            (tmp_path / "d" / _HEX).write_bytes(_framed(0x0CDB20DE, body[:at] + bytes([value]) + body[at + 1 :]))
            try:
                _read(tmp_path)
            except TreeringError:
                refused += 1
    assert refused > len(body)


@pytest.mark.parametrize("path", [b"../d/" + _HEX.encode(), b"/d/" + _HEX.encode(), b"x/../d/" + _HEX.encode(), b"d/x"])
def test_a_node_is_looked_for_in_data_files_alone(tmp_path: Path, path: bytes) -> None:
    node = _leaf([b"a"], [b"x"])
    _place(tmp_path, node, _manifest(node, path=path))
    with pytest.raises(CorruptError, match="is not the name of a data file"):
        _read(tmp_path)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    node = _leaf([b"a"], [b"x"])
    outside = _place(tmp_path / "outside", node, _manifest(node))
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "manifest.ocdbt").write_bytes(_manifest(node))
    (tmp_path / "inside" / "d").symlink_to(outside / "d")
    with pytest.raises(CorruptError, match="link that leads out"):
        _read(tmp_path / "inside")


def test_nodes_that_refer_to_each_other_again_and_again_are_refused(tmp_path: Path) -> None:
    """Ten of them would have a key for each of a billion ways down."""
    path = f"d/{_HEX}".encode()
    table = _varints(1, len(path), 0) + path
    rows = _varints(0, 1, 1, 1, 0, 0) + b"ab" + _varints(0, 0, 0, 0, 50, 50, 1, 1, 1, 1, 0, 0)
    node = _framed(0x0CDB20DE, b"\1" + table + _varint(2) + rows)
    _place(tmp_path, node, _manifest(node, height=1))
    with pytest.raises(CorruptError):
        _read(tmp_path)
    leaf = _leaf([b"a"], [b"x"])
    rows = _varints(0, 1, 1, 1, 1) + b"ab" + _varints(0, 0, 0, 0, len(leaf), len(leaf), 1, 1, 1, 1, 0, 0)
    parent = _framed(0x0CDB20DE, b"\1" + table + _varint(2) + rows)
    (tmp_path / "d" / _HEX).write_bytes(leaf + parent)
    (tmp_path / "manifest.ocdbt").write_bytes(_manifest(parent, height=1, offset=len(leaf)))
    with pytest.raises(CorruptError, match="two nodes refer to"):
        _read(tmp_path)


def test_keys_that_unfold_to_far_more_than_was_read_are_refused(tmp_path: Path) -> None:
    count = 20_000
    long = 65_000
    shared = _varints(*[long] * (count - 1))
    own = _varint(long) + b"\1" * (count - 1)
    body = b"\0\0" + _varint(count) + shared + own + bytes(long) + b"a" * (count - 1) + bytes(2 * count)
    node = _framed(0x0CDB20DE, body)
    _place(tmp_path, node, _manifest(node))
    with pytest.raises(CorruptError, match="far more memory"):
        _read(tmp_path)


def test_newer_versions_and_other_kinds_are_named(tmp_path: Path) -> None:
    node = _leaf([b"a"], [b"x"])
    _place(tmp_path, _framed(0x0CDB20DE, node[14:-4], version=3), _manifest(node))
    with pytest.raises(UnsupportedError, match="version 3"):
        _read(tmp_path)
    (tmp_path / "d" / _HEX).write_bytes(_framed(0x0CDB20DE, node[14:-4], compression=9))
    with pytest.raises(UnsupportedError, match="method 9"):
        _read(tmp_path)
    numbered = bytearray(_manifest(node)[14:-4])
    numbered[16] = 1
    (tmp_path / "manifest.ocdbt").write_bytes(_framed(0x0CDB3A2A, bytes(numbered)))
    with pytest.raises(UnsupportedError, match="numbered"):
        _read(tmp_path)
