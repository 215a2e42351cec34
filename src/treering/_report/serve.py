"""A report that follows a run, served to the browsers of this machine: ``treering report RUN --serve``.

Nothing is written and nothing but GET and HEAD is answered, on the loopback address alone. Whoever asks needs the
token of the address that is printed. ``Host`` is compared, so that no web page reaches the server by a name of its own
that leads to 127.0.0.1 (DNS rebinding); ``Origin`` and ``Sec-Fetch-Site`` are, so that none asks for it from elsewhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import html
import http
import http.server
import os
import secrets
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, Final

from treering import __version__
from treering._leaves.documents.index import LEAVES_INDEX
from treering._printable import printable
from treering._store.resolve import find_at, opened_store
from treering._values.checkpoint_names import INDEX, LEFT_DOCUMENT, RUN_DOCUMENT, step_of_name
from treering._view.plain import json_text
from treering.errors import TreeringError

ADDRESS: Final = "127.0.0.1"
"""The only address that is listened at."""
_UNMADE: Final = """<!doctype html><html lang=en><meta charset=utf-8><title>treering report</title>
<style>:root{color-scheme:light dark}body{font:1rem/1.5 system-ui;margin:3rem auto;max-width:40rem}</style>
<h1>The report cannot be made now</h1><p role=alert>"""
_DOCUMENTS: Final = (RUN_DOCUMENT, LEFT_DOCUMENT, INDEX, LEAVES_INDEX)
_OF_ALL: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_OF_TEXTS: Final = {"Content-Type": "text/plain; charset=utf-8"}
# The page brings the hashes of its own scripts and styles, which narrow this down; a page cannot forbid to be framed.
_OF_PAGES: Final = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


def version_at(path: str | os.PathLike[str]) -> Hashable:
    """Return what is another value once a save, a removal or a note of a run has changed what is at a path.

    On disk, that is one listing of a folder's names and a look at a few of them; in a bucket four requests, however
    many steps there are.

    Raises:
        StoreError: nothing is there, or the store refuses.

    Example:
        >>> import os, tempfile
        >>> import treering as tr
        >>> path = os.path.join(tempfile.mkdtemp(), "run")
        >>> with tr.Run(path) as run:
        ...     first = run.save(1, {"w": 1.5}), run.wait(), version_at(path)
        ...     second = run.save(2, {"w": 1.5}), run.wait(), version_at(path)
        >>> first[-1] == version_at(path), second[-1] == version_at(path)
        (False, True)
    """
    if (found := find_at(path)) is not None and found.is_file:
        return found.version
    with opened_store(path) as store:
        places = [] if store.asks_by_request else sorted(store.places())
        # What saved the latest step may have died before it noted that in the run's document.
        steps = [name for name in places if step_of_name(name) is not None]
        names = (*_DOCUMENTS, *(f"{name}/{INDEX}" for name in steps[-1:]))
        entries = [store.find(name) for name in names]
    return (*places, *(entry and entry.version for entry in entries))


@dataclasses.dataclass(frozen=True)
class Edition:
    """One state of a report, as it goes to browsers."""

    tag: str
    """Its ``ETag``: the same for the same content only."""
    data: bytes
    """JSON: the document as ``document``, or, where it could not be made, ``error`` with why."""
    page: bytes
    """The whole page."""
    made: bool = True
    """Whether it is the report, not why that cannot be made."""


class FollowedReport:
    """A report that is made anew once what it shows has changed, and only once however many pages ask for it.

    Args:
        gather: reads the document, which JSON can hold.
        render: makes the page of a document.
        look: returns another value once ``gather`` would find something else; cheap.
        every: seconds for which what was found counts: so often at most is looked, however many pages ask.
        again: seconds until what could not be read is read again, though nothing may have changed.
    """

    def __init__(
        self, gather: Callable[[], dict[str, Any]], render: Callable[[dict[str, Any]], bytes],
        look: Callable[[], Hashable], *, every: float = 0.25, again: float = 2.0,
    ) -> None:  # fmt: skip
        self._gather, self._render, self._look = gather, render, look
        self._every, self._again = every, again
        self._lock = threading.Lock()
        self._next = 0.0
        self._seen: tuple[Hashable] | None = None
        self._edition: Edition | None = None

    def current(self) -> Edition:
        """Return the newest edition; the one before while another thread is making it."""
        known = self._edition
        if not self._lock.acquire(blocking=known is None) and known is not None:
            return known
        try:
            if self._edition is None or time.monotonic() >= self._next:
                self._edition = self._newer(self._edition)
            return self._edition
        finally:
            self._lock.release()

    def _newer(self, known: Edition | None) -> Edition:
        try:
            # What changes after this look is found by the next one.
            seen = (self._look(),)
            if known is None or seen != self._seen:
                document = self._gather()
                tag, data = _encode(document=document)
                # The page asks with its tag first, so that it is not drawn a second time at once.
                page = self._render(document).replace(b"<html", f"<html data-tag='{tag}'".encode(), 1)
                known = Edition(tag, data, page)
            self._seen, self._next = seen, time.monotonic() + self._every
        except (TreeringError, OSError) as error:
            self._seen, self._next = None, time.monotonic() + self._again
            text = printable(str(error))
            # It is asked for again by its header ``Refresh``.
            return Edition(*_encode(error=text), f"{_UNMADE}{html.escape(text)}".encode(), made=False)
        return known


def _encode(**members: Any) -> tuple[str, bytes]:
    data = json_text(members).encode("utf-8", "backslashreplace")
    return f'"{hashlib.sha256(data).hexdigest()[:32]}"', data


class ReportServer(http.server.ThreadingHTTPServer):
    """Serves a report on the loopback address, to those who know its token.

    Args:
        report: what is served.
        port: where; 0 for any that is free.
        at_once: so many connections are answered; one more is closed.
        patience: seconds that a connection may be silent.

    Attributes:
        url: the address of the page, with the token.

    Raises:
        OSError: the port is taken, or may not be used.
    """

    daemon_threads = True
    allow_reuse_address = os.name == "posix"  # elsewhere it would let another program listen at the same port
    allow_reuse_port = False

    def __init__(self, report: FollowedReport, *, port: int = 0, at_once: int = 32, patience: float = 5.0) -> None:
        self.report = report
        self._patience = patience
        self.token = secrets.token_urlsafe(24)
        self._places = threading.BoundedSemaphore(at_once)
        super().__init__((ADDRESS, port), _Requests)
        self.hosts = tuple(f"{name}:{self.server_port}" for name in (ADDRESS, "localhost"))
        self.url = f"http://{self.hosts[0]}/{self.token}/"

    def server_bind(self) -> None:
        """Take the port; the base class would ask a name server what this machine is called."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection, which may not be silent for long."""
        connection, address = super().get_request()
        connection.settimeout(self._patience)
        return connection, address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread of its own, or, where there are many already, close the connection."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one request, on its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say what failed, but for a browser that has left."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Requests(http.server.BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    server: ReportServer
    server_version = f"treering/{__version__}"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer with the page, or with its document where that is another one than the page has."""
        token, _, name = self.path.removeprefix("/").partition("/")
        if not self._is_ours() or not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._answer(http.HTTPStatus.FORBIDDEN)
        elif name not in {"", "document"}:
            self._answer(http.HTTPStatus.NOT_FOUND)
        elif not name:
            edition = self.server.report.current()
            self._answer(http.HTTPStatus.OK, edition.page, _OF_PAGES | ({} if edition.made else {"Refresh": "2"}))
        else:
            edition = self.server.report.current()
            same = self.headers.get("If-None-Match") == edition.tag
            told = {"ETag": edition.tag, "Content-Type": "application/json"}
            self._answer(http.HTTPStatus.NOT_MODIFIED if same else http.HTTPStatus.OK, edition.data, told)

    do_HEAD = do_GET  # noqa: N815 - the base class calls it so

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Answer what the base class refuses: what cannot be read, and, as one, all other methods."""
        status = http.HTTPStatus(code)
        self._answer(http.HTTPStatus.METHOD_NOT_ALLOWED if status is http.HTTPStatus.NOT_IMPLEMENTED else status)

    def log_message(self, *_: object) -> None:
        """Say nothing: a page asks once a second."""

    def _is_ours(self) -> bool:
        """Whether the request is for this server by one of its names, and comes from its page or from a person."""
        hosts, origin = self.headers.get_all("Host", []), self.headers.get("Origin")
        if len(hosts) != 1 or hosts[0] not in self.server.hosts or origin not in {None, f"http://{hosts[0]}"}:
            return False
        # A person may follow a link to the page that a notebook shows; nothing else is for other pages.
        opened = self.headers.get("Sec-Fetch-Mode") == "navigate" and self.headers.get("Sec-Fetch-Dest") == "document"
        return opened or self.headers.get("Sec-Fetch-Site", "none") in {"none", "same-origin"}

    def _answer(self, status: http.HTTPStatus, body: bytes = b"", headers: dict[str, str] = _OF_TEXTS) -> None:
        body = body or f"{status} {status.phrase}\n".encode()
        self.send_response(status)
        for name, value in (_OF_ALL | headers).items():
            self.send_header(name, value)
        if status is http.HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        if status is not http.HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if status is not http.HTTPStatus.NOT_MODIFIED and self.command != "HEAD":
            self.wfile.write(body)


def serve(server: ReportServer, *, tell: Callable[[str], None]) -> None:
    """Serve a report until it is interrupted by Ctrl-C.

    Args:
        server: what serves it; it is closed at the end.
        tell: called with the address of the page once it can be opened.
    """
    with server, contextlib.suppress(KeyboardInterrupt):
        tell(server.url)
        server.serve_forever(poll_interval=0.1)
