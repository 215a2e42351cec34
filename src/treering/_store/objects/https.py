"""Plain HTTPS, read-only: what a web server gives by ranges. It needs no package beside the standard library."""

from __future__ import annotations

import contextlib
import email.utils
import errno
import functools
import http.client
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Any, Final, NamedTuple, NoReturn

from treering._store.api import LARGEST_DOCUMENT, Entry, Kind, Reader
from treering._store.failures import naming
from treering._store.objects.repetition import RepeatingClient, ShortAnswer
from treering._store.objects.requests import Answer, Get, Head, List, Listed, ObjectVersion, Range, Request, Status
from treering._store.objects.store import ObjectRoot, ObjectStore
from treering._store.objects.url import READ_ONLY, web_path
from treering._store.pieces import Buffer
from treering._values.checkpoint_names import INDEX
from treering._values.telemetry import TRAFFIC
from treering.errors import NotFoundError

_ASIS: Final = "%/:?&=+,;@~!$'()*[]"
_PARTIAL: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_NOTHING: Final = re.compile(r"bytes \*/0")
_PRIVATE: Final = dict.fromkeys(
    (401, 403), ": it is not public, or a presigned URL is over, which is of one file and never of a folder"
)
_PATIENCE: Final = 10.0
_LOOK: Final = (0, 1)
_FILES: Final = frozenset({".msgpack", ".safetensors", ".gz"})
_SECONDS: Final = 20.0
_FIRST_SECONDS: Final = 5.0
_PIECE: Final = 1 << 20
_LONGEST_DATE: Final = 100
_SLOWEST: Final = 256 << 10


class _Body(NamedTuple):
    """An answer whose body has not been read yet."""

    response: http.client.HTTPResponse
    stop: int
    found: Listed


class WebClient(RepeatingClient):
    """What reads from one web server. Everything else is refused.

    Args:
        shown: the server, ``https://host``.
    """

    def __init__(self, shown: str) -> None:
        super().__init__(shown, _PATIENCE)

    def perform(self, request: Request) -> Answer:
        """Read an object, or its first bytes.

        Raises:
            OSError: the server refuses, or the request is of another kind.
        """
        match request:
            case Get(name, most):
                return self._repeat(lambda: self._get(name, most), f"GET '{self.shown}/{name}'")
            case Range(name):
                return self._repeat(lambda: self._fill(request), f"GET '{self.shown}/{name}'")
            case Head(name):
                return self._repeat(lambda: self._look(name), f"GET '{self.shown}/{name}'")
            case List():
                raise OSError(errno.EOPNOTSUPP, "a web server lists nothing: pass the URL of a checkpoint or of a file")
        raise OSError(errno.EROFS, READ_ONLY)

    def put_parts(self, name: str, buffers: Iterable[Buffer], size: int, *, new: bool = True) -> NoReturn:
        """Refuse to write.

        Raises:
            OSError: always.
        """
        raise OSError(errno.EROFS, READ_ONLY)

    def _look(self, name: str) -> Answer:
        # Not by HEAD, which a presigned URL does not allow.
        body = self._ask(name, _LOOK)
        body.response.close()
        return Answer(Status.DONE, found=body.found)

    def _get(self, name: str, most: int | None) -> Answer:
        body = self._ask(name, None if most is None else (0, max(most, 1)))
        stop = min(body.stop, LARGEST_DOCUMENT + 1)  # whoever asks for all of it refuses what is larger
        with body.response:
            data = b"".join(_read(body.response, stop))
        _require_end(len(data), stop)
        return Answer(Status.DONE, data[:most], body.found)

    def _fill(self, wanted: Range) -> Answer:
        span = wanted.span
        body = self._ask(wanted.name, (span.start, span.stop))
        with body.response:
            if body.found.version == wanted.version:
                position = span.start
                for data in _read(body.response, body.stop - position):
                    span.fill(position, memoryview(data))
                    position += len(data)
                _require_end(position, span.stop)
                TRAFFIC.add(received=span.stop - span.start)
        return Answer(Status.DONE, found=body.found)

    def _ask(self, name: str, wanted: tuple[int, int] | None) -> _Body:
        """Ask for an object, or for bytes of it, once."""
        url = urllib.parse.quote(f"{self.shown}/{name}", safe=_ASIS)
        headers = {"Accept-Encoding": "identity"}
        if wanted is not None:
            headers["Range"] = f"bytes={wanted[0]}-{wanted[1] - 1}"
        request = urllib.request.Request(url, headers=headers)  # noqa: S310 - `web_path` lets only https through
        try:
            response = _opener().open(request, timeout=_SECONDS)
        except urllib.error.HTTPError as error:
            with error:
                none = error.code == 416 and _NOTHING.fullmatch(error.headers.get("Content-Range", ""))  # noqa: PLR2004
                if none and wanted is not None:
                    body = self._ask(name, None)
                    if body.stop:
                        body.response.close()
                        raise ShortAnswer(errno.EIO, "the server says that it is empty, and sends bytes") from error
                    return body
                if error.code == http.client.GONE:
                    raise FileNotFoundError from error
                raise OSError(f"HTTP {error.code} {error.reason}{_PRIVATE.get(error.code, '')}") from error
        except http.client.HTTPException as error:
            raise ConnectionError(str(error)) from error
        return _body_of(name, response, wanted)


class _WebPlace(ObjectStore):
    """A place on a web server. A name in it is no part of a URL, as that of the place is."""

    def key_of(self, name: str) -> str:
        """Return the whole name, of which a server that reads a URL finds the file of that name."""
        return super().key_of(name.replace("%", "%25").replace("?", "%3F"))


class WebRoot(ObjectRoot):
    """All places on web servers. What nothing lists is a checkpoint where it has an index, else a file."""

    def __init__(self) -> None:
        super().__init__(connect)

    def find(self, path: PurePath) -> Entry | None:
        """Return the file at a path, or the place if an index is in it."""
        if "?" in path.parent.name:  # a query ends a URL
            return None
        client, key = connect(path)
        if path.suffix not in _FILES and "?" not in key and path.name != INDEX:
            with contextlib.suppress(OSError):  # PermissionError is what some buckets say of a name that is not there
                if client.perform(Head(f"{key}/{INDEX}")).found is not None:
                    return Entry(path.name, 0, 0.0, None, Kind.PLACE)
        with naming(os.fspath(path), "read"):
            return super().place(path.parent).find(path.name)

    def place(self, path: PurePath) -> ObjectStore:
        """Return the store at a path, not opened yet."""
        client, key = connect(path)
        return _WebPlace(client, f"{key}/" if key else "", path)

    def open_file(self, path: PurePath) -> Reader:
        """Open a single file."""
        unlisted = "nothing is listed here: pass a file, or one checkpoint"
        if not connect(path)[1]:
            raise NotFoundError(f"there is no checkpoint at the top of {os.fspath(path)!r}", hint=unlisted)
        try:
            return super().place(path.parent).open_file(path.name)
        except NotFoundError as error:
            presigned = "a presigned URL is of one file: a checkpoint needs URLs without a query"
            error.hint = presigned if "?" in path.name else unlisted
            raise


def connect(path: PurePath) -> tuple[WebClient, str]:
    """Return the client of the server that a path is on, and the path's key there."""
    place = web_path(path)
    return WebClient("//".join(place.parts[:2])), "/".join(place.parts[2:])


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect to what is not encrypted, and to nothing but the web."""

    def redirect_request(  # noqa: PLR0917 - of the standard library
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if not newurl.lower().startswith("https://" if req.type == "https" else ("https://", "http://127.0.0.1:")):
            raise urllib.error.HTTPError(req.full_url, code, "it leads to a URL that is not encrypted", headers, fp)
        fp.close()  # urllib reads all of it, and it may have no end
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect."""

    def redirect_request(self, *_: Any) -> None:
        return None


def sends_on_to(url: str) -> str | None:
    """Return the other host to which a server sends whoever asks for a URL; None where it does not, or does not answer.

    Raises nothing: what else is wrong with the server is told to those who ask it for something.
    """
    opener = urllib.request.build_opener(_NoRedirects)
    with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
        try:
            opener.open(urllib.request.Request(url, method="HEAD"), timeout=_FIRST_SECONDS).close()  # noqa: S310
        except urllib.error.HTTPError as error:
            error.close()
            host = urllib.parse.urlsplit(error.headers.get("Location") or "").hostname
            return None if host == urllib.parse.urlsplit(url).hostname else host
    return None


@functools.cache
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_Redirects)


def _read(response: http.client.HTTPResponse, count: int) -> Iterator[bytes]:
    """Yield so many bytes as they come; fewer where they do not come, or come too slowly."""
    deadline = time.monotonic() + _SECONDS + count / _SLOWEST
    with contextlib.suppress(OSError, http.client.HTTPException):
        while count and time.monotonic() < deadline and (data := response.read1(min(_PIECE, count))):
            count -= len(data)
            yield data


def _body_of(name: str, response: http.client.HTTPResponse, wanted: tuple[int, int] | None) -> _Body:
    """Return the answer with what its header says.

    Raises:
        ValueError: it is not what was asked for.
    """
    headers = response.headers
    version = ObjectVersion(headers.get("ETag") or headers.get("Last-Modified") or "")
    when = 0.0
    with contextlib.suppress(ValueError, OverflowError, TypeError):  # no date
        modified = email.utils.parsedate_tz(headers.get("Last-Modified", "")[:_LONGEST_DATE])
        when = float(email.utils.mktime_tz(modified)) if modified else 0.0
    partial = _PARTIAL.fullmatch(headers.get("Content-Range", ""))
    if response.status == http.client.PARTIAL_CONTENT and partial is not None and wanted is not None:
        start, end, size = map(int, partial.groups())
        if start == wanted[0] and end + 1 == min(wanted[1], size):
            return _Body(response, end + 1, Listed(name, size, when, version))
    elif response.length is not None and (wanted in {None, _LOOK} or (not wanted[0] and response.length <= wanted[1])):
        return _Body(response, response.length, Listed(name, response.length, when, version))
    response.close()
    raise ValueError("the server ignores ranges, or does not say how long it is: download it first")


def _require_end(position: int, stop: int) -> None:
    if position != stop:
        raise ShortAnswer(f"the server cut its answer short, at byte {position} of {stop}")
