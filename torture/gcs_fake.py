"""A small fake of the XML API of Google Cloud Storage: what obstore asks of it, with generations that are compared."""

from __future__ import annotations

import contextlib
import dataclasses
import email.message
import email.utils
import hashlib
import http.server
import re
import socket
import threading
import time
import urllib.parse
import uuid
from collections.abc import Mapping
from typing import Any, Final, Self
from xml.sax.saxutils import escape

__all__ = ["GcsFake"]

_RANGE: Final = re.compile(r"bytes=(\d*)-(\d*)")
_PART: Final = re.compile(rb"<PartNumber>(\d+)</PartNumber>")
_MOST_LISTED: Final = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class _Object:
    data: bytes
    generation: int
    modified: float

    @property
    def e_tag(self) -> str:
        return f'"{hashlib.md5(self.data).hexdigest()}"'

    def headers(self) -> dict[str, str]:
        modified = email.utils.formatdate(self.modified, usegmt=True)
        return {"ETag": self.e_tag, "x-goog-generation": str(self.generation), "Last-Modified": modified}


class GcsFake(http.server.ThreadingHTTPServer):
    """The server, in threads of this process; a context manager.

    Attributes:
        objects: what it holds, by bucket and name.
        port: where it listens.
    """

    daemon_threads = True

    def __init__(self) -> None:
        self.objects: dict[str, _Object] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.changing = threading.RLock()
        self._last_generation = time.time_ns() // 1000
        super().__init__(("127.0.0.1", 0), _Handler)
        self.port = int(self.server_address[1])
        self._serving = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._serving.start()

    def put(self, name: str, data: bytes) -> _Object:
        """Make an object; its generation never recurs."""
        with self.changing:
            self._last_generation += 1
            made = self.objects[name] = _Object(data, self._last_generation, time.time())
            return made

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._serving.join()
        self.server_close()

    def __enter__(self) -> Self:
        return self

    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that went away."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    server: GcsFake

    def setup(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().setup()

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        name, query = self._asked()
        if "list-type" in query:
            self._list(name, query)
            return
        found = self.server.objects.get(name)
        if found is None or query.get("generation", str(found.generation)) != str(found.generation):
            self._answer(404)
        elif not _matches(self.headers, found):
            self._answer(412)
        else:
            self._answer_with(found)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_PUT(self) -> None:
        name, query = self._asked()
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "uploadId" in query:
            parts = self.server.uploads.get(query["uploadId"])
            if parts is None:
                self._answer(404)
                return
            parts[int(query["partNumber"])] = data
            self._answer(200, headers={"ETag": f'"{hashlib.md5(data).hexdigest()}"'})
            return
        with self.server.changing:
            if (copied := self.headers.get("x-goog-copy-source")) is not None:
                source = self.server.objects.get(urllib.parse.unquote(copied).strip("/"))
                if source is None:
                    self._answer(404)
                    return
                data = source.data
            made = self.server.put(name, data) if self._holds(name) else None
        self._answer(412) if made is None else self._answer(200, headers=made.headers())

    def do_POST(self) -> None:
        name, query = self._asked()
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "uploads" in query:
            upload = uuid.uuid4().hex
            self.server.uploads[upload] = {}
            self._answer(200, _xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>"))
            return
        with self.server.changing:
            parts = self.server.uploads.get(query.get("uploadId", ""))
            if parts is None or not self._holds(name):
                self._answer(404 if parts is None else 412)
                return
            del self.server.uploads[query["uploadId"]]
            made = self.server.put(name, b"".join(parts[int(number)] for number in _PART.findall(data)))
        self._answer(200, _xml("CompleteMultipartUploadResult", f"<ETag>{escape(made.e_tag)}</ETag>"), made.headers())

    def do_DELETE(self) -> None:
        name, query = self._asked()
        if "uploadId" in query:
            self._answer(204 if self.server.uploads.pop(query["uploadId"], None) is not None else 404)
            return
        with self.server.changing:
            status = 404 if name not in self.server.objects else 204 if self._holds(name) else 412
            if status == 204:
                del self.server.objects[name]
        self._answer(status)

    def _holds(self, name: str) -> bool:
        """Tell whether the condition of the request holds; it is asked for under the lock."""
        wanted = self.headers.get("x-goog-if-generation-match")
        found = self.server.objects.get(name)
        return wanted is None or int(wanted) == (0 if found is None else found.generation)

    def _asked(self) -> tuple[str, dict[str, str]]:
        path, _, query = self.path.partition("?")
        return urllib.parse.unquote(path).strip("/"), dict(urllib.parse.parse_qsl(query, keep_blank_values=True))

    def _list(self, bucket: str, query: Mapping[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        most = int(query.get("max-keys", _MOST_LISTED))
        entries: dict[str, str] = {}
        with self.server.changing:
            found = sorted(self.server.objects.items())
        for whole, one in found:
            name = whole.removeprefix(f"{bucket}/")
            if name == whole or not name.startswith(prefix):
                continue
            cut = name.find(delimiter, len(prefix)) if delimiter else -1
            if cut >= 0:
                place = name[: cut + len(delimiter)]
                entries[place] = f"<CommonPrefixes><Prefix>{escape(place)}</Prefix></CommonPrefixes>"
            else:
                when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(one.modified))
                entries[name] = (
                    f"<Contents><Key>{escape(name)}</Key><LastModified>{when}.{int(one.modified % 1 * 1000):03}Z"
                    f"</LastModified><ETag>{escape(one.e_tag)}</ETag><Size>{len(one.data)}</Size></Contents>"
                )
        names = [name for name in sorted(entries) if name > after]
        more = f"<NextContinuationToken>{escape(names[most - 1])}</NextContinuationToken>" if len(names) > most else ""
        shown = "".join(entries[name] for name in names[:most])
        truncated = str(bool(more)).lower()
        self._answer(200, _xml("ListBucketResult", f"{shown}<IsTruncated>{truncated}</IsTruncated>{more}"))

    def _answer_with(self, found: _Object) -> None:
        size, asked = len(found.data), _RANGE.fullmatch(self.headers.get("Range", ""))
        if asked is None:
            self._answer(200, found.data, found.headers())
            return
        first, last = asked.groups()
        start = int(first) if first else max(0, size - int(last))
        end = min(size, int(last) + 1) if first and last else size
        if start >= size:
            self._answer(416, headers={"Content-Range": f"bytes */{size}"})
            return
        headers = {**found.headers(), "Content-Range": f"bytes {start}-{end - 1}/{size}"}
        self._answer(206, found.data[start:end], headers)

    def _answer(self, status: int, data: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            if self.command != "HEAD":
                self.wfile.write(data)
            self.wfile.flush()


def _xml(name: str, content: str) -> bytes:
    return f"<{name}>{content}</{name}>".encode()


def _matches(headers: email.message.Message, found: _Object) -> bool:
    wanted = headers.get("If-Match")
    generation = headers.get("x-goog-if-generation-match")
    return (wanted is None or wanted.strip('"') == found.e_tag.strip('"')) and (
        generation is None or generation == str(found.generation)
    )
