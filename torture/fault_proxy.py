"""A proxy before a server of objects that does to chosen requests what networks and servers do to them."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import re
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable
from typing import Final, Self

__all__ = ["Fault", "FaultProxy", "Rule", "Seen"]

_WRITES: Final = frozenset({"PUT", "POST", "DELETE"})
_CONDITIONS: Final = frozenset({"if-match", "if-none-match", "x-goog-if-generation-match"})
_LINE: Final = re.compile(rb"HTTP/1\.1 (\d{3})")
_TRICKLES: Final = 8


class Fault(enum.Enum):
    """What becomes of a request."""

    DROP_ANSWER = "the answer is lost"
    """The server has done it; the connection is reset before the answer."""
    RESET_REQUEST = "the request is cut"
    """The connection is reset in the middle of the request."""
    RESET_ANSWER = "the answer is cut"
    """The connection is reset in the middle of the answer."""
    TRUNCATE = "the answer ends early"
    """The connection is closed in the middle of the answer's body."""
    SHORTEN = "the answer is shorter"
    """Half of the answer's body comes, with a length that fits."""
    FLIP = "a bit of the answer flips"
    UNAVAILABLE = "503, not done"
    UNAVAILABLE_DONE = "503, but done"
    CONFLICT = "409, not done"
    DENIED = "403, not done"
    SLOW = "the answer is slow"
    """Its body comes in small pieces."""
    HANG = "no answer, not done"
    HANG_DONE = "no answer, but done"
    LATE = "it is done after its successor"
    """The connection is reset; the request arrives after the next write to the same object."""
    TWICE = "it is done twice"
    """The answer is that of the second time."""
    STALE = "the answer is an old one"
    """It is what the object was when it was last asked for before its last change."""
    NO_RANGE = "the range is ignored"
    """The whole object comes, with 200."""

    @property
    def keeps(self) -> bool:
        """Whether the server never sees the request, or not whole."""
        return self in {Fault.RESET_REQUEST, Fault.UNAVAILABLE, Fault.CONFLICT, Fault.DENIED, Fault.HANG}

    def applies(self, method: str, *, small: bool = False) -> bool:
        """Tell whether it can happen to a request of that method; ``small`` for answers without much of a body."""
        if self in {Fault.TWICE, Fault.LATE, Fault.CONFLICT, Fault.UNAVAILABLE_DONE, Fault.HANG_DONE}:
            return method in _WRITES
        if self in {Fault.SHORTEN, Fault.FLIP, Fault.TRUNCATE, Fault.SLOW}:
            return method == "GET" and not small
        return self not in {Fault.STALE, Fault.NO_RANGE} or method == "GET"


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """Which requests a fault strikes.

    Attributes:
        fault: what becomes of them.
        method: their method; None for all.
        target: a pattern that is searched for in the path and query, without escapes.
        conditional: whether they have a condition; None for all.
        first: number of the first matching request that is struck.
        times: how many of them are.
        seconds: how long a slow answer takes, and how long one that never comes holds its connection.
        at: the share of the bytes after which something is cut, and where a bit flips.
    """

    fault: Fault
    method: str | None = None
    target: str = ""
    conditional: bool | None = None
    first: int = 1
    times: int = 1
    seconds: float = 60.0
    at: float = 0.5

    def matches(self, seen: Seen) -> bool:
        """Tell whether a request is one of those that are counted."""
        return (
            self.method in {None, seen.method}
            and self.conditional in {None, seen.conditional}
            and re.search(self.target, seen.target) is not None
        )


@dataclasses.dataclass(slots=True)
class Seen:
    """A request that came.

    Attributes:
        method: its method.
        target: its path and query, without escapes.
        conditional: whether it has a condition.
        ranged: whether it asks for a range.
        sent: bytes of its body.
        status: what the server answered; 0 where it was not asked.
        size: bytes of the answer's body.
        fault: what became of it.
    """

    method: str
    target: str
    conditional: bool
    ranged: bool
    sent: int = 0
    status: int = 0
    size: int = 0
    fault: Fault | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Message:
    head: bytes
    """The first line and the lines of the headers, without their end."""
    body: bytes

    def raw(self) -> bytes:
        return self.head + b"\r\n\r\n" + self.body

    def headers(self) -> dict[str, str]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def with_headers(self, **new: str | None) -> _Message:
        """Return it with other headers; None takes one away. An underscore stands for a dash."""
        wanted = {name.replace("_", "-").lower(): value for name, value in new.items()}
        first, *lines = self.head.decode("latin-1").split("\r\n")
        kept = [line for line in lines if line.partition(":")[0].strip().lower() not in wanted]
        added = [f"{name}: {value}" for name, value in wanted.items() if value is not None]
        return _Message("\r\n".join([first, *kept, *added]).encode("latin-1"), self.body)


class _Gone(Exception):
    """The other side went away, or is to believe that we did."""


class FaultProxy:
    """The proxy, in threads of this process; a context manager.

    Attributes:
        port: where it listens.
        seen: the requests that came, in order.
        rules: what to strike; they may change at any time by `strike` and `heal`.
        wait: seconds that each request takes longer.
    """

    def __init__(
        self, port: int, rules: Iterable[Rule] = (), *, wait: float = 0.0, whole: Callable[[str], str] | None = None
    ) -> None:
        """Begin to listen.

        Args:
            port: that of the server.
            rules: what to strike.
            wait: seconds that each request takes longer.
            whole: returns a URL, signed in advance, by which the whole object at a path is read: needed where the
                header that asks for a range is signed, and so cannot be left out.
        """
        self.seen: list[Seen] = []
        self.wait = wait
        self._server = port
        self._whole = whole
        self._lock = threading.Lock()
        self._counts: dict[int, int] = {}
        self.rules: list[Rule] = []
        self._late: list[tuple[str, _Message]] = []
        self._before: dict[str, bytes] = {}
        self._now: dict[str, bytes] = {}
        self._end = threading.Event()
        self._open: set[socket.socket] = set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self.strike(*rules)
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._accepting.join()
        self.disconnect()

    def strike(self, *rules: Rule) -> None:
        """Add rules; each counts from now on."""
        with self._lock:
            self.rules += rules

    def heal(self) -> None:
        """Forget all rules, and what was seen; requests on their way go on."""
        with self._lock:
            self.rules.clear()
            self._counts.clear()
            self.seen.clear()

    def disconnect(self) -> None:
        """End all connections."""
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def struck(self) -> int:
        """Return how many requests were struck."""
        with self._lock:
            return sum(one.fault is not None for one in self.seen)

    def deliver_late(self, target: str | None = None) -> int:
        """Let late requests arrive, those to one object or all; return how many there were."""
        with self._lock:
            mine = [one for one in self._late if target in {None, one[0]}]
            self._late = [one for one in self._late if one not in mine]
        for _, message in mine:
            with contextlib.suppress(OSError, _Gone):
                _ask(self._server, message, message.head.split(b" ", 1)[0].decode())
        return len(mine)

    def _accept(self) -> None:
        while not self._end.is_set():
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open.add(client)
        with contextlib.suppress(_Gone, OSError), _Incoming(client) as incoming:
            while (message := incoming.request()) is not None:
                self._handle(message, client)
        with self._lock:
            self._open.discard(client)
        _reset(client)

    def _handle(self, message: _Message, client: socket.socket) -> None:
        seen, rule = self._look(message)
        fault = None if rule is None else rule.fault
        path = seen.target.partition("?")[0]
        if self.wait:
            time.sleep(self.wait)
        if rule is not None and fault is not None and self._keep(rule, fault, message, path, client):
            return
        if fault is Fault.NO_RANGE and seen.ranged:
            message = self._without_range(message, path)
        answer = _ask(self._server, message, seen.method)
        if fault is Fault.TWICE:
            answer = _ask(self._server, message, seen.method)
        seen.status, seen.size = _status(answer), len(answer.body)
        answer = self._remember(seen, path, message, answer, stale=fault is Fault.STALE)
        if seen.method in _WRITES:
            self.deliver_late(path)
        if rule is None or fault is None:
            client.sendall(answer.raw())
        else:
            self._spoil(rule, fault, answer, client)

    def _look(self, message: _Message) -> tuple[Seen, Rule | None]:
        method, target, _ = message.head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
        headers = message.headers()
        conditional, ranged = bool(_CONDITIONS & headers.keys()), "range" in headers
        seen = Seen(method, urllib.parse.unquote(target), conditional, ranged, len(message.body))
        with self._lock:
            self.seen.append(seen)
            struck = None
            for rule in self.rules:
                if rule.matches(seen):
                    count = self._counts[id(rule)] = self._counts.get(id(rule), 0) + 1
                    if struck is None and rule.first <= count < rule.first + rule.times:
                        struck = rule
            seen.fault = None if struck is None else struck.fault
        return seen, struck

    def _keep(self, rule: Rule, fault: Fault, message: _Message, path: str, client: socket.socket) -> bool:
        """Do what keeps a request from the server; False for other faults."""
        match fault:
            case Fault.RESET_REQUEST:
                _break_off(self._server, message.raw()[: int(len(message.raw()) * rule.at)])
                raise _Gone
            case Fault.LATE:
                with self._lock:
                    self._late.append((path, message))
                raise _Gone
            case Fault.HANG:
                self._hold(rule)
            case Fault.UNAVAILABLE:
                client.sendall(_refusal(503, "SlowDown"))
            case Fault.CONFLICT:
                client.sendall(_refusal(409, "ConditionalRequestConflict"))
            case Fault.DENIED:
                client.sendall(_refusal(403, "AccessDenied"))
            case _:
                return False
        return True

    def _spoil(self, rule: Rule, fault: Fault, answer: _Message, client: socket.socket) -> None:
        """Do to an answer what is asked for."""
        body, cut = answer.body, int(len(answer.body) * rule.at)
        match fault:
            case Fault.DROP_ANSWER:
                raise _Gone
            case Fault.HANG_DONE:
                self._hold(rule)
            case Fault.RESET_ANSWER:
                client.sendall(answer.raw()[: int(len(answer.raw()) * rule.at)])
                raise _Gone
            case Fault.TRUNCATE:
                client.sendall(_Message(answer.head, body[:cut]).raw())
                client.shutdown(socket.SHUT_WR)
                raise _Gone
            case Fault.SHORTEN:
                client.sendall(_Message(answer.head, body[:cut]).with_headers(content_length=str(cut)).raw())
            case Fault.FLIP if body:
                cut = min(cut, len(body) - 1)
                flipped = body[:cut] + bytes([body[cut] ^ 1]) + body[cut + 1 :]
                client.sendall(_Message(answer.head, flipped).raw())
            case Fault.UNAVAILABLE_DONE:
                client.sendall(_refusal(503, "ServiceUnavailable"))
            case Fault.SLOW:
                client.sendall(answer.head + b"\r\n\r\n")
                step = max(1, -(-len(body) // _TRICKLES))
                for start in range(0, len(body), step):
                    self._end.wait(rule.seconds / _TRICKLES)
                    client.sendall(body[start : start + step])
            case _:
                client.sendall(answer.raw())

    def _hold(self, rule: Rule) -> None:
        self._end.wait(rule.seconds)
        raise _Gone

    def _without_range(self, message: _Message, path: str) -> _Message:
        if self._whole is None:
            return message.with_headers(range=None)
        url = urllib.parse.urlsplit(self._whole(path))
        return _Message(f"GET {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}".encode(), b"")

    def _remember(self, seen: Seen, path: str, message: _Message, answer: _Message, *, stale: bool) -> _Message:
        """Keep what a whole read answered, until the object has changed: then it is what a stale answer says."""
        key = f"{seen.target} {message.headers().get('range', '')}"
        with self._lock:
            if seen.method in _WRITES:
                changed = [one for one in self._now if one.startswith((f"{path} ", f"{path}?")) or "list-type=" in one]
                for one in changed:
                    self._before[one] = self._now.pop(one)
            elif seen.method == "GET":
                self._now[key] = answer.raw()
                if stale and (old := self._before.get(key)) is not None:
                    head, _, body = old.partition(b"\r\n\r\n")
                    return _Message(head, body)
        return answer


class _Incoming:
    """Messages as they come from a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def request(self) -> _Message | None:
        """Return the next request; None where there are no more."""
        head = self._head()
        return None if head is None else self._with_body(head)

    def answer(self, method: str) -> _Message:
        """Return the answer to a request of that method, its body in one piece."""
        while True:
            head = self._head()
            if head is None:
                raise _Gone
            status = _status(_Message(head, b""))
            if status >= 200:
                break
        if method == "HEAD" or status in {204, 304}:
            return _Message(head, b"")
        return self._with_body(head)

    def _with_body(self, head: bytes) -> _Message:
        message = _Message(head, b"")
        headers = message.headers()
        if "chunked" in headers.get("transfer-encoding", ""):
            body = b"".join(iter(self._chunk, b""))
            return _Message(head, body).with_headers(transfer_encoding=None, content_length=str(len(body)))
        return _Message(head, self._exactly(int(headers.get("content-length", 0))))

    def _head(self) -> bytes | None:
        lines: list[bytes] = []
        while (line := self._file.readline()) not in {b"\r\n", b"\n"}:
            if not line:
                return None
            lines.append(line.rstrip(b"\r\n"))
        return b"\r\n".join(lines)

    def _chunk(self) -> bytes:
        size = int(self._file.readline().split(b";")[0], 16)
        data = self._exactly(size)
        self._file.readline()
        return data

    def _exactly(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) != count:
            raise _Gone
        return data


def _ask(port: int, message: _Message, method: str) -> _Message:
    """Ask the server, on a connection of its own: nothing is sent twice that was meant once."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(message.raw())
        with _Incoming(connection) as incoming:
            return incoming.answer(method)


def _break_off(port: int, data: bytes) -> None:
    """Send a part of a request to the server and reset the connection."""
    with contextlib.suppress(OSError):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(data)
        _reset(connection)


def _status(answer: _Message) -> int:
    found = _LINE.match(answer.head)
    return int(found[1]) if found else 0


def _refusal(status: int, code: str) -> bytes:
    body = f"<Error><Code>{code}</Code><Message>struck by a test</Message></Error>".encode()
    head = f"HTTP/1.1 {status} {code}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}"
    return _Message(head.encode(), body).raw()


def _reset(connection: socket.socket) -> None:
    """Close a connection so that the other side is told of an error."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
