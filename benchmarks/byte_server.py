"""A server that speaks enough of S3 to move bytes, and does nothing else with them: what it costs says little.

``python -m benchmarks.byte_server [--slow SECONDS]`` prints its URL and serves until its standard input ends. It takes
every signature, computes no checksum of a body, and keeps everything in memory. There is one set of objects, which all
names of buckets show. Each request to the bucket ``slow`` waits first, and one to ``slow-30`` waits 30 ms. The bucket
``-`` is none: ``GET /-/requests`` gives the requests since the last time as JSON, ``DELETE /-/PREFIX`` removes objects.

Conditions (If-Match, If-None-Match) are honoured for PUT, GET, HEAD, DELETE and the completion of an upload. An ETag is
random, so that it never recurs.
"""

from __future__ import annotations

import argparse
import bisect
import email.utils
import itertools
import json
import mmap
import secrets
import socket
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from xml.etree import ElementTree
from xml.sax.saxutils import escape

__all__ = ["ByteServer", "main"]

_BLOCK = 256 << 10
_SLAB = 64 << 20
_LARGEST_HEAD = 64 << 10
_REASONS = {100: "Continue", 200: "OK", 204: "No Content", 206: "Partial Content", 304: "Not Modified"} | {
    400: "Bad Request",
    404: "Not Found",
    412: "Precondition Failed",
    416: "Range Not Satisfiable",
    501: "Not Implemented",
}
_CODES = {404: "NoSuchKey", 412: "PreconditionFailed", 416: "InvalidRange", 501: "NotImplemented", 400: "BadRequest"}


class _Arena:
    """Memory for bodies, in blocks that are used again: only the first body pays for its pages."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> list[memoryview]:
        """Blocks for so many bytes; the last one may be longer than what is left."""
        count = -(-size // _BLOCK)
        with self._lock:
            while len(self._free) < count:
                slab = memoryview(mmap.mmap(-1, _SLAB))
                self._free += [slab[at : at + _BLOCK] for at in range(0, _SLAB, _BLOCK)]
            taken = self._free[len(self._free) - count :]
            del self._free[len(self._free) - count :]
        return taken

    def give_back(self, blocks: list[memoryview]) -> None:
        """Let blocks be used again."""
        with self._lock:
            self._free += blocks


class _Body:
    """The bytes of one request or object; its memory is used again once nothing refers to it."""

    def __init__(self, arena: _Arena, size: int) -> None:
        self.size = size
        self._arena = arena
        small = size < _BLOCK // 4
        self._blocks = [] if small else arena.take(size)
        self._views = [memoryview(bytearray(size))] if small else list(self._blocks)

    def __del__(self) -> None:
        self._arena.give_back(self._blocks)

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """The memory of a range, piece by piece."""
        while start < stop:
            index, at = divmod(start, _BLOCK)
            piece = self._views[index][at : at + stop - start]
            yield piece
            start += len(piece)


@dataclass(frozen=True, slots=True)
class _Object:
    """What a key holds: one body, or the parts of an upload."""

    parts: tuple[_Body, ...]
    e_tag: str = field(default_factory=lambda: f'"{secrets.token_hex(16)}"')
    modified: float = field(default_factory=time.time)

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """The memory of a range, piece by piece."""
        for part in self.parts:
            if start < part.size and stop > 0:
                yield from part.pieces(max(0, start), min(stop, part.size))
            start, stop = start - part.size, stop - part.size


@dataclass(frozen=True, slots=True)
class _Request:
    """The head of a request."""

    method: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]

    @property
    def length(self) -> int:
        return int(self.headers.get("content-length", "0"))


@dataclass(frozen=True, slots=True)
class _Answer:
    """What is sent back."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    found: _Object | None = None
    """An object whose bytes are the body, from ``start`` to ``stop``."""
    start: int = 0
    stop: int = 0

    @property
    def length(self) -> int:
        return self.stop - self.start if self.found is not None else len(self.body)


def _refusal(status: int, code: str = "") -> _Answer:
    code = code or _CODES[status]
    return _Answer(status, {"Content-Type": "application/xml"}, f"<Error><Code>{code}</Code></Error>".encode())


class ByteServer:
    """The objects of all buckets, and the requests that were made.

    Args:
        slow: seconds that each request to the bucket ``slow`` waits.
    """

    def __init__(self, slow: float = 0.05) -> None:
        self.arena = _Arena()
        self._slow = slow
        self._lock = threading.Lock()
        self._objects: dict[str, _Object] = {}
        self._keys: list[str] = []
        self._uploads: dict[str, dict[int, _Object]] = {}
        self._requests: list[tuple[str, str, str, int, float, float]] = []

    def answer(self, request: _Request, body: _Body) -> _Answer:
        """What becomes of a request; the log is told by `note`."""
        if request.bucket == "-":
            return self._control(request)
        name, _, milliseconds = request.bucket.partition("-")
        if name == "slow":
            time.sleep(int(milliseconds) / 1000 if milliseconds.isdigit() else self._slow)
        query = request.query
        choices: tuple[tuple[bool, Callable[[_Request, _Body], _Answer]], ...] = (
            ("uploads" in query and bool(request.key), self._begin_upload),
            ("uploadId" in query and request.method == "PUT", self._put_part),
            ("uploadId" in query and request.method == "POST", self._complete_upload),
            ("uploadId" in query and request.method == "DELETE", self._abort_upload),
            ("delete" in query and request.method == "POST", self._delete_many),
            (not request.key and request.method == "GET", self._list),
        )
        for is_meant, perform in choices:
            if is_meant:
                return perform(request, body)
        if not request.key:
            return _Answer(200)
        methods = {"PUT": self._put, "GET": self._get, "HEAD": self._get, "DELETE": self._delete}
        return methods.get(request.method, self._unknown)(request, body)

    def note(self, request: _Request, status: int, began: float, ended: float) -> None:
        """Add a request to the log."""
        if request.bucket != "-":
            query = ",".join(name for name in request.query if name in {"uploads", "uploadId", "delete", "list-type"})
            self._requests.append((request.method, request.key, query, status, began, ended))

    def _control(self, request: _Request) -> _Answer:
        with self._lock:
            if request.method == "DELETE":
                for key in [key for key in self._keys if key.startswith(request.key)]:
                    self._remove(key)
                self._uploads.clear()
                return _Answer(204)
            told, self._requests = self._requests, []
        return _Answer(200, {"Content-Type": "application/json"}, json.dumps(told).encode())

    def _unknown(self, request: _Request, body: _Body) -> _Answer:
        del request, body
        return _refusal(501)

    # Objects.

    def _refused(self, request: _Request) -> _Answer | None:
        """The answer to a request whose condition does not hold; called with the lock."""
        there = self._objects.get(request.key)
        if_match, if_none = request.headers.get("if-match"), request.headers.get("if-none-match")
        if if_match is not None and (there is None or if_match not in {"*", there.e_tag}):
            return _refusal(412)
        if if_none is not None and there is not None and if_none in {"*", there.e_tag}:
            return _refusal(412) if request.method not in {"GET", "HEAD"} else _Answer(304, {"ETag": there.e_tag})
        return None

    def _set(self, request: _Request, new: _Object) -> _Answer:
        with self._lock:
            refused = self._refused(request)
            if refused is not None:
                return refused
            if request.key not in self._objects:
                bisect.insort(self._keys, request.key)
            self._objects[request.key] = new
        return _Answer(200, {"ETag": new.e_tag})

    def _put(self, request: _Request, body: _Body) -> _Answer:
        if "x-amz-copy-source" in request.headers:
            return _refusal(501)
        return self._set(request, _Object((body,)))

    def _get(self, request: _Request, _: _Body) -> _Answer:
        with self._lock:
            there = self._objects.get(request.key)
            if there is None:
                return _refusal(404)
            refused = self._refused(request)
        if refused is not None:
            return refused
        headers = {"ETag": there.e_tag, "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        headers["Last-Modified"] = email.utils.formatdate(there.modified, usegmt=True)
        asked = request.headers.get("range")
        if asked is None:
            return _Answer(200, headers, found=there, stop=there.size)
        first, end = asked.removeprefix("bytes=").split("-")
        start = int(first) if first else max(0, there.size - int(end))
        stop = min(there.size, int(end) + 1) if first and end else there.size
        if start >= stop:
            return _refusal(416)
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{there.size}"
        return _Answer(206, headers, found=there, start=start, stop=stop)

    def _remove(self, key: str) -> None:
        if self._objects.pop(key, None) is not None:
            del self._keys[bisect.bisect_left(self._keys, key)]

    def _delete(self, request: _Request, _: _Body) -> _Answer:
        with self._lock:
            refused = self._refused(request)
            if refused is None:
                self._remove(request.key)
        return refused or _Answer(204)

    def _delete_many(self, _: _Request, body: _Body) -> _Answer:
        root = ElementTree.fromstring(b"".join(body.pieces(0, body.size)))
        keys = [each.text or "" for each in root.iter() if each.tag.rpartition("}")[2] == "Key"]
        with self._lock:
            for key in keys:
                self._remove(key)
        told = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        return _xml(f"<DeleteResult>{told}</DeleteResult>")

    # Uploads.

    def _begin_upload(self, request: _Request, _: _Body) -> _Answer:
        upload = secrets.token_hex(8)
        with self._lock:
            self._uploads[upload] = {}
        return _xml(
            f"<InitiateMultipartUploadResult><Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key>"
            f"<UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
        )

    def _put_part(self, request: _Request, body: _Body) -> _Answer:
        parts = self._uploads.get(request.query["uploadId"])
        if parts is None:
            return _refusal(404, "NoSuchUpload")
        part = parts[int(request.query["partNumber"])] = _Object((body,))
        return _Answer(200, {"ETag": part.e_tag})

    def _complete_upload(self, request: _Request, body: _Body) -> _Answer:
        parts = self._uploads.get(request.query["uploadId"])
        if parts is None:
            return _refusal(404, "NoSuchUpload")
        root = ElementTree.fromstring(b"".join(body.pieces(0, body.size)))
        numbers = [int(each.text or "0") for each in root.iter() if each.tag.rpartition("}")[2] == "PartNumber"]
        if numbers != sorted(parts):
            return _refusal(400, "InvalidPart")
        answer = self._set(request, _Object(tuple(itertools.chain(*(parts[number].parts for number in numbers)))))
        if answer.status != 200:
            return answer
        with self._lock:
            self._uploads.pop(request.query["uploadId"], None)
        return _xml(
            f"<CompleteMultipartUploadResult><Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key>"
            f"<ETag>{escape(answer.headers['ETag'])}</ETag></CompleteMultipartUploadResult>",
            answer.headers,
        )

    def _abort_upload(self, request: _Request, _: _Body) -> _Answer:
        with self._lock:
            self._uploads.pop(request.query["uploadId"], None)
        return _Answer(204)

    # Listings.

    def _list(self, request: _Request, _: _Body) -> _Answer:
        query = request.query
        prefix, delimiter, most = query.get("prefix", ""), query.get("delimiter", ""), int(query.get("max-keys", 1000))
        after = query.get("continuation-token") or query.get("start-after", "")
        told: list[str] = []
        with self._lock:
            at = bisect.bisect_right(self._keys, after) if after >= prefix else bisect.bisect_left(self._keys, prefix)
            last = after
            while at < len(self._keys) and len(told) < most and self._keys[at].startswith(prefix):
                key = self._keys[at]
                cut = key.find(delimiter, len(prefix)) if delimiter else -1
                if cut >= 0:
                    # Everything below this place is one entry: what sorts behind all of it comes next.
                    last = key[: cut + len(delimiter)] + "\U0010ffff"
                    told.append(f"<CommonPrefixes><Prefix>{escape(key[: cut + 1])}</Prefix></CommonPrefixes>")
                    at = bisect.bisect_right(self._keys, last)
                    continue
                told.append(_entry(key, self._objects[key]))
                last, at = key, at + 1
            more = at < len(self._keys) and self._keys[at].startswith(prefix)
        token = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if more else ""
        return _xml(
            f"<ListBucketResult><Name>{request.bucket}</Name><Prefix>{escape(prefix)}</Prefix>"
            f"<KeyCount>{len(told)}</KeyCount><MaxKeys>{most}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>"
            f"{token}{''.join(told)}</ListBucketResult>"
        )


def _xml(text: str, headers: dict[str, str] | None = None) -> _Answer:
    return _Answer(200, {"Content-Type": "application/xml", **(headers or {})}, text.encode())


def _entry(key: str, there: _Object) -> str:
    modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(there.modified))
    return (
        f"<Contents><Key>{escape(key)}</Key><LastModified>{modified}</LastModified>"
        f"<ETag>{escape(there.e_tag)}</ETag><Size>{there.size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
    )


class _Connection:
    """One connection of a client: requests one after the other."""

    def __init__(self, server: ByteServer, connection: socket.socket) -> None:
        self._server = server
        self._socket = connection
        self._buffer = bytearray()

    def serve(self) -> None:
        """Answer requests until the client closes."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while (request := self._head()) is not None:
                began = time.monotonic()
                body = self._body(request)
                answer = self._server.answer(request, body)
                # Before the answer is sent: what the client asks because of it has begun later.
                self._server.note(request, answer.status, began, time.monotonic())
                del body
                self._send(request, answer)
        except OSError:
            pass  # the client has gone
        finally:
            self._socket.close()

    def _head(self) -> _Request | None:
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            more = self._socket.recv(_LARGEST_HEAD)
            if not more or len(self._buffer) > _LARGEST_HEAD:
                return None
            self._buffer += more
        lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        method, target, _ = lines[0].split(" ", 2)
        path, _, query = target.partition("?")
        bucket, _, key = urllib.parse.unquote(path).lstrip("/").partition("/")
        pairs = (line.partition(":") for line in lines[1:])
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        asked = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        return _Request(method, bucket, key, asked, headers)

    def _body(self, request: _Request) -> _Body:
        if "aws-chunked" in request.headers.get("content-encoding", "") or "transfer-encoding" in request.headers:
            raise OSError("bodies in chunks are not read")
        if request.headers.get("expect", "").lower() == "100-continue":
            self._socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = _Body(self._server.arena, request.length)
        for piece in body.pieces(0, body.size):
            ready = min(len(piece), len(self._buffer))
            piece[:ready] = self._buffer[:ready]
            del self._buffer[:ready]
            while ready < len(piece):
                count = self._socket.recv_into(piece[ready:])
                if not count:
                    raise OSError("a body was cut off")
                ready += count
        return body

    def _send(self, request: _Request, answer: _Answer) -> None:
        lines = [f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        lines += [f"Content-Length: {answer.length}", "x-amz-request-id: 0", "\r\n"]
        head = "\r\n".join(lines).encode()
        if request.method == "HEAD":
            self._socket.sendall(head)
        elif answer.found is None:
            self._socket.sendall(head + answer.body)
        else:
            self._socket.sendall(head)
            for piece in answer.found.pieces(answer.start, answer.stop):
                self._socket.sendall(piece)


def main(arguments: list[str] | None = None) -> int:
    """Serve until the standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", type=float, default=0.05, help="seconds a request to the bucket `slow` waits")
    server = ByteServer(parser.parse_args(arguments).slow)
    listening = socket.create_server(("127.0.0.1", 0), backlog=256)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)

    def accept() -> None:
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=_Connection(server, connection).serve, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
