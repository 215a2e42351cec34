"""A hub on this machine: what uploading a folder to a model repository, and downloading it, ask of a server.

Files up to ``largest_regular`` bytes come inside the commit, as small texts do at a real hub; larger ones are sent
before it by the LFS protocol, and the commit names their digests.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REPOSITORY = "me/digits"


class Hub:
    """The content of the only repository, and what was asked."""

    def __init__(self, largest_regular: int, refused: str | None) -> None:
        """Begin without a repository; answer the first commit that touches the folder ``refused`` with 403."""
        self.largest_regular = largest_regular
        self.refused = refused
        self.there = False
        self.url = ""
        self.files: dict[str, bytes] = {}
        self.large: dict[str, bytes] = {}
        self.commits: list[dict[str, str]] = []
        self.lock = threading.Lock()

    @property
    def sha(self) -> str:
        """What a commit is called: as many digits as git has."""
        return f"{len(self.commits):040x}"

    def is_large(self, size: int) -> bool:
        return size > self.largest_regular

    def oid(self, path: str) -> str | None:
        """The digest by which a client finds out that it need not send a file: that of git, or that of LFS."""
        data = self.files.get(path)
        if data is None:
            return None
        if self.is_large(len(data)):
            return hashlib.sha256(data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Answer with a status and JSON; bytes are answered as they are."""
        with self.lock:
            api = f"/api/models/{REPOSITORY}"
            match method, path:
                case "POST", "/api/repos/create":
                    self.there = True
                    return 200, {"url": f"{self.url}/{REPOSITORY}"}
                case _ if not self.there:
                    return 404, {"error": "there is no such repository"}
                case "POST", _ if path == f"{api}/preupload/main":
                    return 200, {"files": [self._mode(file) for file in json.loads(body)["files"]]}
                case "POST", _ if path == f"/{REPOSITORY}.git/info/lfs/objects/batch":
                    return 200, {
                        "transfer": "basic",
                        "objects": [self._slot(one) for one in json.loads(body)["objects"]],
                    }
                case "PUT", _ if path.startswith("/large/"):
                    self.large[hashlib.sha256(body).hexdigest()] = body
                    return 200, {}
                case "POST", _ if path == f"{api}/commit/main":
                    return self._commit([json.loads(line) for line in body.splitlines()])
                case "GET", _ if path in {api, f"{api}/revision/main", f"{api}/revision/{self.sha}"}:
                    siblings = [{"rfilename": name} for name in sorted(self.files)]
                    return 200, {"id": REPOSITORY, "sha": self.sha, "siblings": siblings}
                case "GET", _ if path.startswith(f"{api}/tree/"):
                    return 200, [self._entry(name) for name in sorted(self.files)]
                case "GET" | "HEAD", _ if path.startswith(f"/{REPOSITORY}/resolve/"):
                    return 200, self.files[path.removeprefix(f"/{REPOSITORY}/resolve/").split("/", 1)[1]]
                case _:
                    return 404, {"error": f"this hub knows no {method} {path}"}

    def _mode(self, file: dict[str, Any]) -> dict[str, Any]:
        mode = "lfs" if self.is_large(file["size"]) else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": self.oid(file["path"])}

    def _entry(self, path: str) -> dict[str, Any]:
        return {"type": "file", "path": path, "size": len(self.files[path]), "oid": self.oid(path)}

    def _slot(self, one: dict[str, Any]) -> dict[str, Any]:
        if one["oid"] in self.large:
            return one
        return one | {"actions": {"upload": {"href": f"{self.url}/large/{one['oid']}", "header": {}}}}

    def _commit(self, lines: list[dict[str, Any]]) -> tuple[int, Any]:
        head, files = lines[0]["value"], lines[1:]
        if self.refused is not None and any(file["value"]["path"].startswith(self.refused + "/") for file in files):
            self.refused = None
            return 403, {"error": "not today"}
        for file in files:
            value = file["value"]
            if file["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            else:
                self.files[value["path"]] = self.large[value["oid"]]
        self.commits.append(head)
        return 200, {"commitUrl": f"{self.url}/{REPOSITORY}/commit/{self.sha}", "commitOid": self.sha}


@contextlib.contextmanager
def serving(*, largest_regular: int = 5 << 20, refused: str | None = None) -> Iterator[Hub]:
    """Serve a hub on a free port of 127.0.0.1."""
    hub = Hub(largest_regular, refused)

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
            status, found = hub.answer(self.command, path, body)
            data = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("X-Repo-Commit", hub.sha)
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_HEAD = do_POST = do_PUT = _answer  # noqa: N815 - named by the base class

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
