"""What the bucket benchmark compares with: raw obstore, raw sockets, s3fs + safetensors, TensorStore's kvstore.

The raw ones move the bytes of all leaves as one object, from and into memory that is there, and check nothing.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import importlib
import importlib.util
import os
import queue
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

import jax
import numpy as np
import obstore
import safetensors
import safetensors.flax
import tensorstore
from obstore.store import S3Store

from benchmarks.byte_bucket import BUCKET, start_server
from benchmarks.workloads import Tree, flat

__all__ = ["PEERS", "Peer", "RawObstore", "RawSockets", "S3fs", "TensorStore", "is_installed"]

_PART = 16 << 20
_AT_ONCE = 8


def is_installed(package: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(package) is not None


class Peer(Protocol):
    """Another way to bring a tree into a bucket and back."""

    name: str
    raw: bool
    """Whether it moves plain bytes between memory that is there and the bucket."""

    def save(self, key: str, given: Any) -> None:
        """Write a tree, or plain bytes, below a key."""

    def load(self, key: str, room: Any) -> Any:
        """Return the leaves by key, or fill the room with plain bytes."""


def _ranges(size: int) -> list[tuple[int, int]]:
    return [(start, min(start + _PART, size)) for start in range(0, size, _PART)]


class RawObstore:
    """obstore: one object in parts of 16 MiB, unsigned bodies; ranges of 16 MiB; 8 at a time."""

    name = "raw obstore"
    raw = True

    @cached_property
    def _store(self) -> S3Store:
        return S3Store(
            BUCKET,
            endpoint=start_server(),
            access_key_id="key",
            secret_access_key="secret",
            region="us-east-1",
            unsigned_payload=True,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )

    def save(self, key: str, given: bytes) -> None:
        """Put the bytes in parts."""
        view = memoryview(given)
        pieces = (view[start:stop] for start, stop in _ranges(len(view)))
        obstore.put(self._store, key, pieces, chunk_size=_PART, max_concurrency=_AT_ONCE)

    def load(self, key: str, room: np.ndarray[Any, Any]) -> None:
        """Get the ranges, and copy each into the room."""

        def fetch(span: tuple[int, int]) -> None:
            start, stop = span
            data = obstore.get_range(self._store, key, start=start, end=stop)
            room[start:stop] = np.frombuffer(data, np.uint8)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(fetch, _ranges(room.nbytes)))


class RawSockets:
    """Sockets, requests signed here (SigV4, unsigned bodies): what Python can do at best; the same parts and ranges."""

    name = "raw sockets"
    raw = True

    def save(self, key: str, given: bytes) -> None:
        """Send the parts from where they are."""
        view = memoryview(given)
        with self._connections() as request:
            begun = request("POST", key, {"uploads": ""}, b"", None)
            found = re.search(rb"<UploadId>(\w+)</UploadId>", begun)
            assert found is not None  # our own server's answer
            upload = found[1].decode()

            def put(numbered: tuple[int, tuple[int, int]]) -> None:
                number, (start, stop) = numbered
                request("PUT", key, {"partNumber": str(number), "uploadId": upload}, view[start:stop], None)

            spans = list(enumerate(_ranges(len(view)), 1))
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(put, spans))
            parts = "".join(f"<Part><PartNumber>{number}</PartNumber></Part>" for number, _ in spans)
            whole = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
            request("POST", key, {"uploadId": upload}, whole, None)

    def load(self, key: str, room: np.ndarray[Any, Any]) -> None:
        """Receive the ranges where they belong."""
        view = memoryview(room)
        with self._connections() as request, ThreadPoolExecutor(_AT_ONCE) as pool:
            spans = _ranges(len(view))
            list(pool.map(lambda span: request("GET", key, {}, b"", (span[0], view[span[0] : span[1]])), spans))

    @contextlib.contextmanager
    def _connections(self) -> Iterator[Callable[..., bytes]]:
        """What makes a request over a connection that is free."""
        host = urlsplit(start_server()).netloc
        free: queue.SimpleQueue[_Wire] = queue.SimpleQueue()
        wires = [_Wire(host) for _ in range(_AT_ONCE)]
        for wire in wires:
            free.put(wire)

        def request(*arguments: Any) -> bytes:
            wire = free.get()
            try:
                return wire.request(*arguments)
            finally:
                free.put(wire)

        try:
            yield request
        finally:
            for wire in wires:
                wire.close()


class _Wire:
    """One connection that signs its requests."""

    def __init__(self, host: str) -> None:
        self._host = host
        name, _, port = host.partition(":")
        self._socket = socket.create_connection((name, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        self._socket.close()

    def request(
        self, method: str, key: str, query: dict[str, str], body: Any, into: tuple[int, memoryview] | None
    ) -> bytes:
        """Send a request and return the answer's body, or put it ``into`` memory: the range that begins there."""
        path = quote(f"/{BUCKET}/{key}")
        asked = "&".join(f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in sorted(query.items()))
        headers = self._signed(method, path, asked)
        if into is not None:
            headers["range"] = f"bytes={into[0]}-{into[0] + len(into[1]) - 1}"
        lines = [f"{method} {path}?{asked} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        lines += [f"content-length: {len(body)}", "\r\n"]
        self._socket.sendall("\r\n".join(lines).encode())
        if len(body):
            self._socket.sendall(body)
        return self._answer(into)

    def _answer(self, into: tuple[int, memoryview] | None) -> bytes:
        buffer = b""
        while b"\r\n\r\n" not in buffer:
            more = self._socket.recv(1 << 12)
            if not more:
                raise OSError("the server closed the connection")
            buffer += more
        head, _, rest = buffer.partition(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        found = re.search(rb"(?i)content-length: (\d+)", head)
        size = int(found[1]) if found else 0
        if status >= 300 or (into is not None and size != len(into[1])):
            raise OSError(f"status {status}, {size} bytes")
        room = memoryview(bytearray(size)) if into is None else into[1]
        room[: len(rest)] = rest
        at = len(rest)
        while at < size:
            count = self._socket.recv_into(room[at:])
            if not count:
                raise OSError("an answer was cut off")
            at += count
        return bytes(room) if into is None else b""

    def _signed(self, method: str, path: str, query: str) -> dict[str, str]:
        """The headers of a request with its signature (AWS Signature Version 4)."""
        now = datetime.datetime.now(datetime.UTC)
        day, moment = now.strftime("%Y%m%d"), now.strftime("%Y%m%dT%H%M%SZ")
        headers = {"host": self._host, "x-amz-content-sha256": "UNSIGNED-PAYLOAD", "x-amz-date": moment}
        names = ";".join(headers)
        shown = "".join(f"{name}:{value}\n" for name, value in headers.items())
        canonical = f"{method}\n{path}\n{query}\n{shown}\n{names}\nUNSIGNED-PAYLOAD"
        scope = f"{day}/us-east-1/s3/aws4_request"
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        secret = b"AWS4secret"
        for part in scope.split("/"):
            secret = hmac.digest(secret, part.encode(), "sha256")
        text = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{digest}"
        signature = hmac.digest(secret, text.encode(), "sha256").hex()
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential=key/{scope}, SignedHeaders={names}, Signature={signature}"
        )
        return headers


class S3fs:
    """safetensors' bytes in one object, by s3fs."""

    name = "s3fs + safetensors"
    raw = False

    @cached_property
    def _system(self) -> Any:
        # It has 19 packages, and no test needs it.
        return importlib.import_module("s3fs").S3FileSystem(
            key="key",
            secret="secret",
            endpoint_url=start_server(),
            client_kwargs={"region_name": "us-east-1"},
            use_listings_cache=False,
        )

    def save(self, key: str, given: Tree) -> None:
        """Make safetensors' bytes and put them."""
        self._system.pipe_file(f"{BUCKET}/{key}", safetensors.flax.save(dict(flat(given))))

    def load(self, key: str, room: Tree) -> dict[str, Any]:
        """Get the bytes, and make jax arrays of them."""
        # safetensors.flax.load knows no bfloat16; this does the same.
        found = dict(safetensors.deserialize(self._system.cat_file(f"{BUCKET}/{key}")))
        arrays = {
            name: np.frombuffer(found[name]["data"], leaf.dtype).reshape(found[name]["shape"])
            for name, leaf in flat(room)
        }
        return jax.block_until_ready(jax.device_put(arrays))


class TensorStore:
    """One object for each leaf, by TensorStore's kvstore, all at once."""

    name = "TensorStore kvstore"
    raw = False

    def _open(self, key: str) -> Any:
        return tensorstore.KvStore.open(
            {
                "driver": "s3",
                "bucket": BUCKET,
                "endpoint": start_server(),
                "aws_region": "us-east-1",
                "aws_credentials": {"type": "environment"},
                "path": f"{key}/",
            }
        ).result()

    def save(self, key: str, given: Tree) -> None:
        """Write the bytes of every leaf."""
        store = self._open(key)
        writes = [store.write(name, np.asarray(leaf).tobytes()) for name, leaf in flat(given)]
        for write in writes:
            write.result()

    def load(self, key: str, room: Tree) -> dict[str, Any]:
        """Read the bytes of every leaf, and make jax arrays of them."""
        store = self._open(key)
        reads = {name: (leaf, store.read(name)) for name, leaf in flat(room)}
        arrays = {
            name: np.frombuffer(read.result().value, leaf.dtype).reshape(leaf.shape)
            for name, (leaf, read) in reads.items()
        }
        return jax.block_until_ready(jax.device_put(arrays))


def _installed() -> tuple[type[Peer], ...]:
    os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
    return (RawObstore, RawSockets, *((S3fs,) if is_installed("s3fs") else ()), TensorStore)


PEERS = _installed()
"""Those that are installed: s3fs and its 19 packages need not be."""
