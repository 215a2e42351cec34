"""A web server of files on this machine, with ranges, as real ones give them; or without."""

from __future__ import annotations

import contextlib
import email.utils
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


class WebFiles:
    """What a server has, and what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranges = True
        self.asked: list[tuple[str, str | None]] = []
        self.refusals: list[int] = []
        """Statuses of the next answers."""
        self.cut = 0
        """How many of the next bodies end in the middle."""
        self.claims = 0, 0
        """By how much the ends of a range are other ones in the answer's header."""
        self.secret: str | None = None
        """The query without which nothing is given."""
        self.url = ""


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[WebFiles]:
    """Serve a folder for as long as the block lasts."""
    files = WebFiles(folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            with contextlib.suppress(ConnectionError):  # a reader who has seen enough
                _answer(self, files)

        do_HEAD = do_GET  # noqa: N815 - the name is that of the standard library

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        files.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01))
        thread.start()
        try:
            yield files
        finally:
            server.shutdown()
            thread.join()


def _answer(handler: BaseHTTPRequestHandler, files: WebFiles) -> None:
    files.asked.append((handler.path, handler.headers.get("Range")))
    path, _, query = handler.path.partition("?")
    file = files.folder / unquote(path).lstrip("/")
    if files.refusals:
        _refuse(handler, files.refusals.pop(0))
    elif files.secret is not None and query != files.secret:
        _refuse(handler, 403)
    elif not file.is_file():
        _refuse(handler, 404)
    else:
        _send(handler, files, file)


def _send(handler: BaseHTTPRequestHandler, files: WebFiles, file: Path) -> None:
    data, found = file.read_bytes(), file.stat()
    start, stop = 0, len(data)
    wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
    if files.ranges and wanted is not None:
        start, stop = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
        if start >= len(data):
            handler.send_response(416)
            handler.send_header("Content-Range", f"bytes */{len(data)}")
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        handler.send_response(206)
        first, last = start + files.claims[0], stop - 1 + files.claims[1]
        handler.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
    else:
        handler.send_response(200)
    handler.send_header("Content-Length", str(stop - start))
    handler.send_header("ETag", f'"{found.st_mtime_ns}-{len(data)}"')
    handler.send_header("Last-Modified", email.utils.formatdate(found.st_mtime, usegmt=True))
    handler.end_headers()
    if files.cut:
        files.cut -= 1
        stop = (start + stop) // 2
        handler.close_connection = True
    handler.wfile.write(data[start:stop])


def _refuse(handler: BaseHTTPRequestHandler, status: int) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", "0")
    handler.end_headers()
