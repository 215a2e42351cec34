"""``treering report --serve``: whom it answers, what it says, and that it follows a run without reading it in vain."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import treering as tr
from tests import buckets, faults
from tests.command import inside
from treering._report.contents import gather
from treering._report.page import render
from treering._report.serve import FollowedReport, ReportServer, serve, version_at
from treering.errors import CorruptError

TREE = {"w": 1.5}


class Reading:
    """Stands for what reads a document: counts how often, and fails where told to."""

    def __init__(self) -> None:
        self.text = "first"
        self.error: Exception | None = None
        self.version = 0
        self.read = self.looked = 0

    def gather(self) -> dict[str, Any]:
        self.read += 1
        if self.error is not None:
            raise self.error
        return {"text": self.text}

    def look(self) -> int:
        self.looked += 1
        return self.version

    def change(self, text: str) -> None:
        self.text, self.version = text, self.version + 1


def page_of(document: dict[str, Any]) -> bytes:
    return f"<html><p>{document['text']}".encode()


@contextlib.contextmanager
def running(server: ReportServer) -> Iterator[ReportServer]:
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def reading() -> Reading:
    return Reading()


@pytest.fixture
def server(reading: Reading) -> Iterator[ReportServer]:
    report = FollowedReport(reading.gather, page_of, reading.look, every=0.0, again=0.0)
    with running(ReportServer(report)) as found:
        yield found


class Answer:
    """What a server said."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.status, self.headers, self.body = answer.status, answer.headers, answer.read()


def ask(server: ReportServer, path: str, method: str = "GET", **headers: str) -> Answer:
    """Ask for a path, in which ``{}`` is the token; a header that is empty is not sent."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    with contextlib.closing(connection):
        connection.putrequest(method, path.replace("{}", server.token), skip_host=True, skip_accept_encoding=True)
        for name, value in {"Host": f"127.0.0.1:{server.server_port}", **headers}.items():
            if value:
                connection.putheader(name.replace("_", "-"), value.format(port=server.server_port))
        connection.endheaders()
        return Answer(connection.getresponse())


def say(server: ReportServer, request: bytes) -> bytes:
    """Send bytes, and return all that comes back until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as sent:
        with contextlib.suppress(ConnectionError):
            sent.sendall(request)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while more := sent.recv(1 << 16):
                answer += more
    return answer


# ------------------------------------------------------------------------------------------------ who gets an answer


@pytest.mark.parametrize("path", ["/{}", "/{}/"])
def test_the_token_opens_the_page(server: ReportServer, path: str) -> None:
    answer = ask(server, path)
    assert answer.status == 200
    assert answer.body.endswith(b">first")
    assert server.url == f"http://127.0.0.1:{server.server_port}/{server.token}/"
    assert len(server.token) >= 32
    assert ask(server, path, Host="localhost:{port}").status == 200


REFUSED: dict[str, dict[str, str]] = {
    "another name, as of DNS rebinding": {"Host": "evil.example:{port}"},
    "another name without a port": {"Host": "evil.example"},
    "the name without its port": {"Host": "127.0.0.1"},
    "another port": {"Host": "127.0.0.1:1"},
    "a longer name": {"Host": "127.0.0.1:{port}.evil.example"},
    "another address that leads here": {"Host": "[::1]:{port}"},
    "no name": {"Host": ""},
    "another page": {"Origin": "http://evil.example"},
    "a page of nowhere": {"Origin": "null"},
    "a page of another port": {"Origin": "http://127.0.0.1:1"},
    "a script of another page": {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "cors", "Sec_Fetch_Dest": "empty"},
    "an image of another page": {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "no-cors", "Sec_Fetch_Dest": "image"},
    "a frame": {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "iframe"},
}


@pytest.mark.parametrize("headers", REFUSED.values(), ids=REFUSED)
def test_other_hosts_and_other_pages_are_refused(
    server: ReportServer, reading: Reading, headers: dict[str, str]
) -> None:
    for path in ("/{}/", "/{}/document"):
        answer = ask(server, path, **headers)
        assert (answer.status, answer.body) == (403, b"403 Forbidden\n")
    assert reading.read == reading.looked == 0


def test_two_hosts_are_refused(server: ReportServer) -> None:
    host = f"Host: 127.0.0.1:{server.server_port}\r\n"
    request = f"GET /{server.token}/ HTTP/1.1\r\n"
    assert b" 200 " in say(server, f"{request}{host}\r\n".encode())
    assert b" 403 " in say(server, f"{request}{host}{host}\r\n".encode())
    assert b"first" not in say(server, f"GET /{server.token}/\r\n\r\n".encode())  # HTTP/0.9 has no headers


def test_a_person_and_the_page_itself_are_answered(server: ReportServer) -> None:
    typed = {"Sec_Fetch_Site": "none", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
    own = {"Sec_Fetch_Site": "same-origin", "Sec_Fetch_Mode": "cors", "Sec_Fetch_Dest": "empty"}
    assert ask(server, "/{}/", **typed).status == 200
    assert ask(server, "/{}/", **typed | {"Sec_Fetch_Site": "cross-site"}).status == 200  # a link in a notebook
    assert ask(server, "/{}/document", **own, Origin="http://127.0.0.1:{port}").status == 200


@pytest.mark.parametrize(
    "path", ["/", "/document", "//", "/wrong/", "/wrong/document", "*", "/?token={}", "/{}x/", "/%7b/"]
)
def test_without_the_token_nothing_is_told(server: ReportServer, reading: Reading, path: str) -> None:
    assert (answer := ask(server, path)).status == 403
    assert server.token.encode() not in answer.body
    assert reading.read == 0


def test_a_token_of_other_letters_is_wrong(server: ReportServer) -> None:
    assert ask(server, f"/{server.token.swapcase()}/").status == 403
    assert ask(server, f"/{server.token[:-1]}/").status == 403
    assert b" 403 " in say(
        server, f"GET /\xff/ HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode("latin-1")
    )


@pytest.mark.parametrize(
    "path",
    ["/{}/other", "/{}/document/", "/{}/document?x", "/{}/?x", "/{}/../{}/", "/{}/../../etc/passwd", "/{}//etc/passwd",
     "/{}/%2e%2e/run.json", "/{}/run.json", "/{}/step_00000001/treering.json", "/{}/report.js"],
)  # fmt: skip
def test_there_is_nothing_else(server: ReportServer, path: str) -> None:
    assert ask(server, path).status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW", "get"])
def test_other_methods_are_refused(server: ReportServer, reading: Reading, method: str) -> None:
    answer = ask(server, "/{}/", method)
    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
    assert reading.read == 0


def test_head_answers_as_get_without_a_body(server: ReportServer) -> None:
    for path in ("/{}/", "/{}/document"):
        whole, head = ask(server, path), ask(server, path, "HEAD")
        assert (head.status, head.body) == (200, b"")
        assert int(head.headers["Content-Length"]) == len(whole.body)
    assert ask(server, "/", "HEAD").status == 403


def test_long_and_odd_requests_end_at_once(server: ReportServer) -> None:
    host = f"Host: 127.0.0.1:{server.server_port}\r\n".encode()
    line = f"GET /{server.token}/".encode()
    asked = {
        "a long line": line + b"x" * (1 << 20) + b" HTTP/1.1\r\n" + host + b"\r\n",
        "a long header": line + b" HTTP/1.1\r\n" + host + b"X: " + b"x" * (1 << 20) + b"\r\n\r\n",
        "many headers": line + b" HTTP/1.1\r\n" + host + b"X: x\r\n" * 10_000 + b"\r\n",
        "another protocol": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        "no protocol": b"GET\r\n\r\n",
        "a later version": line + b" HTTP/3.0\r\n" + host + b"\r\n",
    }
    for what, request in asked.items():
        answer = say(server, request)
        assert b" 200 " not in answer, what
        assert b"first" not in answer, what
        assert not answer or answer.startswith((b"HTTP/1.0 4", b"HTTP/1.0 5", b"4", b"505")), what
    assert ask(server, "/{}/").status == 200


def test_connections_are_few_and_end_by_themselves(reading: Reading) -> None:
    server = ReportServer(FollowedReport(reading.gather, page_of, reading.look), patience=0.2, at_once=3)
    with running(server), contextlib.ExitStack() as held:
        silent = [held.enter_context(socket.create_connection(("127.0.0.1", server.server_port))) for _ in range(3)]
        for one in silent:
            one.sendall(b"GET /")  # and no more
        deadline = time.monotonic() + 20
        while threading.active_count() < 5 and time.monotonic() < deadline:
            time.sleep(0.001)
        with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
            ask(server, "/{}/")
        assert [one.recv(100) for one in silent] == [b""] * 3
        while (last := attempt(server)) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert last == 200


def attempt(server: ReportServer) -> int | None:
    with contextlib.suppress(http.client.RemoteDisconnected, ConnectionError):
        return ask(server, "/{}/").status
    return None


def test_headers_keep_the_page_to_itself(server: ReportServer) -> None:
    for path in ("/{}/", "/{}/document", "/{}/other", "/"):
        headers = ask(server, path).headers
        assert headers["Cache-Control"] == "no-store"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "Access-Control-Allow-Origin" not in headers
        assert "Python" not in headers["Server"]
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]


def test_only_the_loopback_address_is_listened_at(server: ReportServer) -> None:
    assert server.server_address[0] == "127.0.0.1"


# --------------------------------------------------------------------------------------------------- what it answers


def test_a_document_is_sent_once(server: ReportServer, reading: Reading) -> None:
    first = ask(server, "/{}/document")
    tag = first.headers["ETag"]
    assert json.loads(first.body) == {"document": {"text": "first"}}
    assert tag.encode() in ask(server, "/{}/").body  # the page knows what it shows
    same = ask(server, "/{}/document", If_None_Match=tag)
    assert (same.status, same.body) == (304, b"")
    reading.change("second")
    second = ask(server, "/{}/document", If_None_Match=tag)
    assert json.loads(second.body) == {"document": {"text": "second"}}
    assert ask(server, "/{}/document", If_None_Match=second.headers["ETag"]).status == 304
    assert reading.read == 2


def test_many_pages_read_no_more_than_one(reading: Reading) -> None:
    with running(ReportServer(FollowedReport(reading.gather, page_of, reading.look, every=3600))) as server:
        for _ in range(20):
            assert ask(server, "/{}/").status == ask(server, "/{}/document").status == 200
        assert (reading.read, reading.looked) == (1, 1)


def test_who_asks_while_it_is_read_again_gets_the_one_before(reading: Reading) -> None:
    asked, go = threading.Event(), threading.Event()

    def gather() -> dict[str, Any]:
        if reading.version:
            asked.set()
            assert go.wait(30)
        return reading.gather()

    report = FollowedReport(gather, page_of, reading.look, every=0.0)
    before = report.current()
    reading.change("second")
    with contextlib.ExitStack() as ends:
        thread = threading.Thread(target=report.current)
        thread.start()
        ends.callback(thread.join)
        ends.callback(go.set)
        assert asked.wait(30)
        assert report.current() is before
    assert b"second" in report.current().page


def test_an_error_is_a_page_that_tries_again(server: ReportServer, reading: Reading) -> None:
    good = ask(server, "/{}/document").headers["ETag"]
    reading.error = CorruptError("<b>the file</b> is \x1b[31mdamaged", path=("x",), offset=0)
    reading.change("second")
    page = ask(server, "/{}/")
    assert page.status == 200
    assert b"&lt;b&gt;the file&lt;/b&gt; is \\x1b[31mdamaged" in page.body
    assert b"Traceback" not in page.body
    assert int(page.headers["Refresh"]) >= 1
    told = ask(server, "/{}/document", If_None_Match=good)
    assert "is \\x1b[31mdamaged" in json.loads(told.body)["error"]
    assert ask(server, "/{}/document", If_None_Match=told.headers["ETag"]).status == 304
    reading.error = None  # and nothing changes, as when a server did not answer
    assert json.loads(ask(server, "/{}/document", If_None_Match=told.headers["ETag"]).body) == {
        "document": {"text": "second"}
    }
    assert "Refresh" not in ask(server, "/{}/").headers


def test_what_cannot_be_read_is_not_read_at_every_look(reading: Reading) -> None:
    reading.error = CorruptError("damaged", path=("x",), offset=0)
    report = FollowedReport(reading.gather, page_of, reading.look, every=0.0, again=3600)
    assert [report.current().made for _ in range(5)] == [False] * 5
    assert reading.read == 1


def test_ctrl_c_ends_it(monkeypatch: pytest.MonkeyPatch, reading: Reading) -> None:
    told: list[str] = []
    faults.fail(monkeypatch, ReportServer, "service_actions", KeyboardInterrupt())
    serve(ReportServer(FollowedReport(reading.gather, page_of, reading.look)), tell=told.append)
    (url,) = told
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", int(url.split(":")[2].split("/")[0])), timeout=5)


# ---------------------------------------------------------------------------------------------------- what has changed


def changes(path: str | Path) -> Iterator[str]:
    """Change a run in each way, and name it."""
    with tr.Run(path, keep=tr.KeepLast(2)) as run:
        for step in (1, 2, 3):
            run.save(step, TREE)
            run.wait()
            yield f"step {step}"
    with tr.Run(path) as run:
        run.delete(3)
        yield "a removal"
        run.save(3, TREE)
        run.wait()
        yield "the same step again"


@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_a_look_sees_each_change_and_no_other(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = buckets.install(monkeypatch) if place == "bucket" else None
    path = "memory://look/run" if bucket else str(tmp_path / "run")
    seen = []
    for _ in changes(path):
        seen.append(version_at(path))
        assert version_at(path) == seen[-1]
        if bucket is not None:
            assert bucket.counted(lambda: version_at(path)) <= 6
    assert len(set(seen)) == len(seen) == 5


def test_a_step_that_nobody_noted_is_seen(tmp_path: Path) -> None:
    with tr.Run(tmp_path / "run") as run:
        run.save(1, TREE)
    before = version_at(tmp_path / "run")
    (tmp_path / "run" / "step_00000002").mkdir()
    begun = version_at(tmp_path / "run")
    tr.save(tmp_path / "run" / "step_00000002", TREE)
    assert len({before, begun, version_at(tmp_path / "run")}) == 3


@pytest.mark.parametrize("name", ["checkpoint", "state.msgpack", "leaves"])
def test_other_forms_are_looked_at_too(name: str, tmp_path: Path) -> None:
    save: Callable[..., object] = tr.leaves.tree_serialize_leaves if name == "leaves" else tr.save
    options: dict[str, Any] = {} if name == "leaves" else {"overwrite": True}
    save(tmp_path / name, TREE, **options)
    before = version_at(tmp_path / name)
    assert version_at(tmp_path / name) == before
    save(tmp_path / name, {"w": 2.5}, **options)
    assert version_at(tmp_path / name) != before


def test_what_is_gone_is_an_error_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "run"
    report = FollowedReport(
        lambda: {"text": str(tr.Run(path).latest())}, page_of, lambda: version_at(path), every=0.0, again=0.0
    )
    assert not report.current().made
    with tr.Run(tmp_path / "run") as run:
        run.save(1, TREE)
    assert b">1" in report.current().page


def test_the_page_that_follows_a_run_may_ask_the_address_that_it_came_from(tmp_path: Path) -> None:
    with tr.Run(tmp_path / "run") as run:
        run.save(1, TREE)
    assert b"connect-src 'self'" in render(gather(tmp_path / "run"), live=True)


def test_the_command_serves_and_ends_with_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tr.Run(tmp_path / "run") as run:
        run.save(1, TREE)
    path = str(tmp_path / "run")
    faults.fail(monkeypatch, ReportServer, "service_actions", KeyboardInterrupt())
    assert "http://127.0.0.1:" in inside("report", path, "--serve", code=0)[0]
    for name in ("none", "empty"):  # a training that has saved nothing yet
        (tmp_path / "empty").mkdir(exist_ok=True)
        shown, said = inside("report", str(tmp_path / name), "--serve", code=0)
        assert "http://127.0.0.1:" in shown
        assert "the page shows what is saved there later" in said
    (tmp_path / "text").write_text("no checkpoint")
    inside("report", str(tmp_path / "text"), "--serve", code=2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "cannot be used" in inside("report", path, "--serve", "--port", port, code=2)[1]
