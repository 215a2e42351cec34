"""From a URL, the environment and options to the client of a bucket: one for each bucket and process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import http.client
import importlib
import os
import re
import threading
import urllib.parse
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Final, cast

from treering._printable import kind_of
from treering._store.objects.obstore_stores import config_of, store_environment
from treering._store.objects.requests import Client
from treering._store.objects.store import GRACE
from treering._store.objects.url import BucketPath, bucket_path
from treering._values.arguments import require_flags
from treering.errors import MissingExtraError, PermissionDeniedError, UnsupportedError

_SECONDS: Final = 1.0
_METADATA: Final = "http://169.254.169.254"
# Any one of these is enough; https://developmentseed.org/obstore/latest/authentication/ has them.
_ENOUGH: Final[Mapping[str, tuple[str, ...]]] = {
    "s3": (
        "AWS_SECRET_ACCESS_KEY", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_SKIP_SIGNATURE", "AWS_IMDSV1_FALLBACK",
    ),
    "gs": (
        "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_SERVICE_ACCOUNT_KEY",
        "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_BEARER_TOKEN", "GOOGLE_SKIP_SIGNATURE",
    ),
    "az": (
        "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY", "AZURE_STORAGE_SAS_KEY",
        "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_TOKEN", "AZURE_STORAGE_CLIENT_SECRET", "AZURE_CLIENT_SECRET",
        "AZURE_FEDERATED_TOKEN_FILE", "IDENTITY_ENDPOINT", "AZURE_USE_AZURE_CLI", "AZURE_SKIP_SIGNATURE",
        "AZURE_STORAGE_USE_EMULATOR",
    ),
}  # fmt: skip
_LINES: Final = {
    "s3": """set them in the environment:
  export AWS_ACCESS_KEY_ID=...
  export AWS_SECRET_ACCESS_KEY=...
  export AWS_REGION=...
(eval "$(aws configure export-credentials --format env)" takes them from the aws command; a public bucket:
treering.bucket(url, anonymous=True))""",
    "gs": """log in, or set one of these in the environment:
  gcloud auth application-default login
  export GOOGLE_SERVICE_ACCOUNT=/path/to/service-account.json
  export GOOGLE_APPLICATION_CREDENTIALS=/path/to/credentials.json
(a public bucket: treering.bucket(url, anonymous=True))""",
    "az": """set them in the environment:
  export AZURE_STORAGE_ACCOUNT_NAME=...
  export AZURE_STORAGE_ACCOUNT_KEY=...
  export AZURE_STORAGE_SAS_TOKEN=...  (in place of the key)
(AZURE_USE_AZURE_CLI=true takes those of the az command; a public container: treering.bucket(url, anonymous=True))""",
}


def require_credentials(scheme: str, bucket: str, environment: Mapping[str, str]) -> None:
    """Refuse a bucket for which neither the environment nor the machine has credentials, in at most 3 seconds.

    Args:
        scheme: ``s3``, ``gs`` or ``az``.
        bucket: the URL of the bucket.
        environment: the variables of the process.

    Raises:
        PermissionDeniedError: there are none; the hint has the lines to set.
    """
    if any(environment.get(name) for name in _ENOUGH[scheme]):
        return
    if scheme == "gs":
        home = environment.get("APPDATA") if os.name == "nt" else environment.get("HOME")
        below = "gcloud" if os.name == "nt" else ".config/gcloud"
        if os.path.exists(os.path.join(home or "/", below, "application_default_credentials.json")):
            return
    with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
        if _machine_has_role(scheme, environment):
            return
    what = f"there are no credentials for {bucket!r}: neither the environment nor this machine has any"
    raise PermissionDeniedError(what, hint=_LINES[scheme])


def _machine_has_role(scheme: str, environment: Mapping[str, str]) -> bool:
    """Ask the cloud's own machines. Two short requests: obstore would repeat them for minutes."""
    if scheme == "s3":
        address = environment.get("AWS_METADATA_ENDPOINT") or _METADATA
        token = _ask(address, "PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
        role = "/latest/meta-data/iam/security-credentials/"
        return bool(token and _ask(address, "GET", role, {"X-aws-ec2-metadata-token": token}))
    if scheme == "gs":
        host = environment.get("GCE_METADATA_HOST")
        flavor = {"Metadata-Flavor": "Google"}
        role = "/computeMetadata/v1/instance/service-accounts/"
        return bool(_ask(f"http://{host}" if host else _METADATA, "GET", role, flavor))
    instance = "/metadata/instance?api-version=2021-02-01"
    return bool(_ask(_METADATA, "GET", instance, {"Metadata": "true"}))


def _ask(address: str, method: str, target: str, headers: dict[str, str]) -> str | None:
    url = urllib.parse.urlsplit(address)
    connection = http.client.HTTPConnection(url.hostname or "", url.port or 80, timeout=_SECONDS)
    with contextlib.closing(connection):
        connection.request(method, target, headers=headers)
        answer = connection.getresponse()
        text = answer.read(4096).decode("utf-8", "replace")
        return text if answer.status == http.client.OK else None


_TIMEOUT: Final = 30.0
_LONGEST: Final = 1e9
_OF_S3: Final = ("region", "kms_key", "requester_pays")
_OF_STORES: Final = (*_OF_S3, "endpoint", "anonymous")
_ENDPOINT: Final = re.compile(r"(?i:https?)://[^\s/]+(?:/\S*)?")
_ENDPOINTS_OF_S3: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_WORD: Final = re.compile(r"[!-~]{1,2048}")
_PREFIXES: Final = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
_NEEDED: Final = {"az:": "AZURE_STORAGE_ACCOUNT_NAME names the account; abfss://CONTAINER@ACCOUNT... says it, too"}
_KINDS: Final = {"S3Store": ("s3", "bucket"), "GCSStore": ("gs", "bucket"), "AzureStore": ("az", "container_name")}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BucketOptions:
    """How a bucket is reached; `treering.bucket` says what each one means."""

    region: str | None = None
    endpoint: str | None = None
    kms_key: str | None = None
    storage_class: str | None = None
    requester_pays: bool = False
    anonymous: bool = False
    timeout: float | None = None
    grace: float | None = None


_LOCK = threading.Lock()
if hasattr(os, "register_at_fork"):
    # Another thread may hold it, for seconds, while it asks for credentials; a fork does not have that thread.
    os.register_at_fork(after_in_child=lambda: globals().update(_LOCK=threading.Lock()))


@dataclasses.dataclass(slots=True, eq=False)
class Connection:
    """What leads to a bucket, with the client that was made of it."""

    url: str
    """The URL of the bucket."""
    options: BucketOptions = dataclasses.field(default_factory=BucketOptions)
    given: Any = None
    """The store of obstore, or the client, that `bucket` was given; None where the environment says the rest."""
    origin: Connection | None = None
    """The one that this one was frozen from; None of one that follows the environment."""
    client: Client | None = None
    environment: Mapping[str, str] | None = None
    """The variables that the client was made with."""

    def connect(self) -> Client:
        """Return the client; where none was given, that of the environment as it is now."""
        if self.origin is not None and self.client is not None:
            return self.client
        with _LOCK:
            return self._renewed()

    def _renewed(self) -> Client:
        while self.client is None or (self.given is None and self.environment != store_environment()):
            self.client, self.environment = None, store_environment()
            self.client = _new_client(self)
        return self.client

    def path(self, text: str) -> BucketPath:
        """Return a path in the bucket that is reached so, as all are that are made of it."""
        return _class_with(BucketPath, self)(text)

    def __reduce__(self) -> tuple[Any, ...]:
        return connection_of, (self.url, self.options, (self.origin or self).given)


_BUCKETS: Final[dict[str, Connection]] = {}
"""Those of plain URLs, which the environment alone says how to reach."""
_CHOSEN: Final[list[Connection]] = []
"""Those with options or a given store, which `bucket` has returned paths for."""


def bucket(
    place: Any,
    prefix: str = "",
    *,
    region: str | None = None,
    endpoint: str | None = None,
    kms_key: str | None = None,
    storage_class: str | None = None,
    requester_pays: bool = False,
    anonymous: bool = False,
    timeout: float | None = None,
    grace: float | None = None,
) -> PurePath:
    """Return a path in a bucket that every function of treering takes, and that carries options which no URL can say.

    The options belong to the path and to those that are made of it by ``/``, and to nothing else: a plain URL of the
    bucket, or a path with other credentials, works beside it. What is not said here comes from the environment, by the
    names that obstore reads: ``AWS_REGION``, ``AWS_ENDPOINT_URL``... As text the path is a plain URL.
    ``TREERING_BUCKET_REQUESTS`` says how many requests the process makes at once, to all buckets. Default: 16.

    Args:
        place: a URL (``s3://bucket/path``, ``gs://...``, ``az://container/...``), or an ``S3Store``, ``GCSStore`` or
            ``AzureStore`` of obstore, whose options and credentials are then taken.
        prefix: the path below it.
        region: the region of an S3 bucket.
        endpoint: the URL of another server than the cloud's. One that begins with ``http://`` is not encrypted.
        kms_key: the key of AWS KMS that encrypts new objects.
        storage_class: the class that data files are put in; documents stay in the usual one, and so do files of at most
            16 MiB of a leaves directory.
        requester_pays: whether the caller pays for the requests.
        anonymous: whether requests are not signed, for public buckets.
        timeout: seconds for a small request; larger ones get more. Default: 30.
        grace: seconds that superseded and removed data stay for readers that have begun. Default: 3600.

    Raises:
        UnsupportedError: it is no place in a bucket, the cloud has no such option, or the path has options already.

    Example:
        >>> import treering
        >>> path = treering.bucket("s3://bucket-of-example/runs", region="eu-central-1")
        >>> str(path / "a")
        's3://bucket-of-example/runs/a'
    """
    options = BucketOptions(
        region=region, endpoint=endpoint, kms_key=kms_key, storage_class=storage_class, requester_pays=requester_pays,
        anonymous=anonymous, timeout=timeout, grace=grace,
    )  # fmt: skip
    if isinstance(place, BucketPath) and place.connection is not None:
        if options != BucketOptions():
            raise UnsupportedError(f"{str(place)!r} has options already", hint="pass its URL with all options")
        return cast("Connection", place.connection).path(str(bucket_path(f"{place}/{prefix}")))
    given = None if isinstance(place, str | os.PathLike) else place
    path = bucket_path(os.fspath(place)) if isinstance(place, str | os.PathLike) else _path_of(place)
    _check(path, options, given)
    if prefix:
        path = bucket_path(f"{path}/{prefix}")
    known = connection_of(path.bucket, options, given)
    if given is not None:
        known.connect()  # what a store was not told it has from the environment of now
    return known.path(str(path))


def connection_of(url: str, options: BucketOptions, given: Any) -> Connection:
    """Return what leads to a bucket so; all of this process share it, and so its client."""
    with _LOCK:
        if given is None and options == BucketOptions():
            return _BUCKETS.setdefault(url, Connection(url))
        return _choose(url, options, given)


def _choose(url: str, options: BucketOptions, given: Any) -> Connection:
    for known in _CHOSEN:
        if (known.url, known.options) == (url, options) and _same(known.given, given):
            return known
    _CHOSEN.append(known := Connection(url, options, given))
    return known


def connect(place: PurePath) -> tuple[Client, str]:
    """Return the client of the bucket of a path, which all of this process share, and the path's key in it.

    A path that `frozen` returned keeps its client; one of `bucket` gets that of its options, and any other one that of
    the environment as it is now.

    Raises:
        MissingExtraError: obstore is not installed.
        PermissionDeniedError: there are no credentials.
        UnsupportedError: the options make no sense.
    """
    known = _connection_at(place)
    path = bucket_path(place) if known.origin is None else cast("BucketPath", place)
    return known.connect(), path.key


def frozen(place: PurePath) -> PurePath:
    """Return a path that leads to the same server and account for ever, and so do all that are made of it.

    Raises:
        MissingExtraError, PermissionDeniedError, UnsupportedError: as for `connect`.
    """
    path = place if isinstance(place, BucketPath) else bucket_path(place)
    known = _connection_at(path)
    client: Any = connect(path)[0]
    return path if known.origin is not None else _frozen_class(type(path), known, client)(path)


def _connection_at(place: PurePath) -> Connection:
    known: Connection | None = place.connection if isinstance(place, BucketPath) else None
    return known or connection_of(bucket_path(place).bucket, BucketOptions(), None)


@functools.lru_cache(maxsize=8)
def _frozen_class(kind: type[BucketPath], known: Connection, client: Any) -> type[BucketPath]:
    return _class_with(kind, Connection(known.url, known.options, known.given, origin=known, client=client))


def _class_with(kind: type[BucketPath], known: Connection) -> type[BucketPath]:
    # Paths make others of their own class, in all versions of Python.
    return type(kind.__name__, (kind,), {"connection": known, "__doc__": kind.__doc__})


def grace_of(path: PurePath) -> float:
    """Return how many seconds superseded data of the bucket of a path stay for readers."""
    grace = _connection_at(path).options.grace
    return GRACE if grace is None else grace


def _new_client(known: Connection) -> Client:
    if hasattr(known.given, "perform"):
        return cast("Client", known.given)
    try:
        stores: Any = importlib.import_module("obstore.store")
    except ImportError as error:
        what = f"{known.url!r} is a bucket, and the package obstore is not installed"
        raise MissingExtraError(what, hint="pip install 'treering[cloud]'") from error
    from treering._store.objects.client import ObstoreClient

    options = known.options
    try:
        if (store := known.given) is None:
            store = _open(stores, known.url, options)
        else:  # for the whole bucket: the path has its prefix
            more = {} if store.credential_provider is None else {"credential_provider": store.credential_provider}
            store = type(store)(config=config_of(store), client_options=store.client_options, **more)
        timeout = _TIMEOUT if options.timeout is None else options.timeout
        return ObstoreClient(store, known.url, timeout=timeout, storage_class=options.storage_class)
    except stores.BaseError as error:
        what = str(error).partition("\n")[0]
        hint = _NEEDED.get(known.url.partition("//")[0])
        raise UnsupportedError(f"{known.url!r} cannot be opened so: {what}", hint=hint) from error


def _open(stores: Any, url: str, options: BucketOptions) -> Any:
    """Open a bucket with obstore, which adds what the environment says."""
    scheme, _, name = url.partition("://")
    kind = "az" if scheme == "abfss" else scheme
    endpoints = {} if options.endpoint is None else {"endpoint": options.endpoint}
    if kind == "s3" and options.endpoint is None:
        endpoints = {name: os.environ[name].strip() for name in _ENDPOINTS_OF_S3 if name in os.environ}
    for variable, endpoint in endpoints.items():
        _check_endpoint(variable, endpoint)
    if not options.anonymous:
        require_credentials(kind, url, os.environ)
        for endpoint in list(endpoints.values())[:1] if kind == "s3" else ():
            _refuse_redirect(endpoint, name)
    config: dict[str, Any] = {**_stripped(kind), **({"skip_signature": True} if options.anonymous else {})}
    client: dict[str, Any] = {}
    if options.endpoint is not None:
        # One of the environment for S3 alone would count more than ``endpoint``.
        name_of = {"gs": "base_url", "s3": "aws_endpoint_url_s3"}
        config[name_of.get(kind, "endpoint")] = options.endpoint
        client["allow_http"] = str(options.endpoint.startswith("http://")).lower()
    if kind == "s3":
        config |= {} if options.region is None else {"region": options.region}
        config |= {"request_payer": True} if options.requester_pays else {}
        if options.kms_key is not None:
            config |= {"server_side_encryption": "aws:kms", "sse_kms_key_id": options.kms_key}
        return stores.S3Store(name, config=config, client_options=client)
    if kind == "gs":
        return stores.GCSStore(name, config=config, client_options=client)
    container, _, host = name.partition("@")
    config |= {"account_name": host.partition(".")[0]} if host else {}
    return stores.AzureStore(container, config=config, client_options=client)


def _path_of(place: Any) -> BucketPath:
    """Return the path of a store of obstore, or of a client."""
    kind = type(place).__name__
    if hasattr(place, "perform"):
        return bucket_path(place.shown)
    if kind in _KINDS and type(place).__module__.startswith("obstore"):
        scheme, member = _KINDS[kind]
        account = place.config.get("account_name") if scheme == "az" else None
        bucket = place.config.get(member)
        if account:
            scheme, bucket = "abfss", f"{bucket}@{account}.dfs.core.windows.net"
        return bucket_path(f"{scheme}://{bucket}/{place.prefix or ''}")
    hint = "pass a URL, or an S3Store, GCSStore or AzureStore of obstore; memory:// and paths on disk need no options"
    raise UnsupportedError(f"{kind_of(place)} is no place in a bucket", hint=hint)


def _check(path: BucketPath, options: BucketOptions, given: Any) -> None:
    """Refuse options that the cloud of a path does not have, and those that a given store has itself."""
    require_flags(requester_pays=options.requester_pays, anonymous=options.anonymous)
    said = [name for name in _OF_STORES if getattr(options, name)]
    if said and given is not None:
        raise UnsupportedError(f"the store that was given has its own {said[0]}", hint="pass the URL with the options")
    _check_endpoint("endpoint", options.endpoint)
    _check_values(options)
    for name in said:
        if name in _OF_S3 and not path.parts[0].startswith("s3"):
            hint = "set it on the bucket, or pass a store of obstore that has it"
            raise UnsupportedError(f"{name} is an option of s3://, not of {path.parts[0]}//", hint=hint)


def _check_endpoint(name: str, url: str | None) -> None:
    """Refuse what is no URL of a server, at which obstore would panic."""
    if url is None:
        return
    parts = None
    with contextlib.suppress(ValueError):  # brackets that do not close, a port that is no number or too large
        given = urllib.parse.urlsplit(url)
        parts = given if _ENDPOINT.fullmatch(url) and given.hostname and given.port != 0 else None
    if parts is None:
        hint = f"write https://HOST, or http://HOST:PORT; without {name} the server is that of the cloud"
        raise UnsupportedError(f"{name} is {url!r}, which is no URL of a server", hint=hint)
    if "@" in parts.netloc:
        hint = "write it without; the credentials of a bucket are variables of their own"
        raise UnsupportedError(f"{name} has a login before its host, {parts.hostname!r}", hint=hint)


def _refuse_redirect(endpoint: str, bucket: str) -> None:
    """Refuse an endpoint that sends requests on to another host, which would get the token of the session, too."""
    from treering._store.objects.https import sends_on_to

    if (host := sends_on_to(f"{endpoint.rstrip('/')}/{bucket}")) is not None:
        what = f"the endpoint {endpoint!r} sends requests on to {host!r:.200}, and credentials are for one host alone"
        raise UnsupportedError(what, hint="name the endpoint of that host, if you trust it")


def _check_values(options: BucketOptions) -> None:
    """Refuse what is no value of an option, at which obstore would panic or wait for ever."""
    for name, least in (("timeout", "more than 0"), ("grace", "0 or more")):
        value = getattr(options, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and value < _LONGEST
        if value is not None and not (is_number and (value > 0 or (name == "grace" and value == 0))):
            hint = f"pass one that is {least}, and less than {_LONGEST:.0e}"
            raise UnsupportedError(f"{name}={value!r:.100} is no number of seconds", hint=hint)
    for name in ("region", "storage_class", "kms_key"):
        value = getattr(options, name)
        if value is not None and not (isinstance(value, str) and _WORD.fullmatch(value)):
            hint = "it has letters, digits and signs, no spaces"
            raise UnsupportedError(f"{name}={value!r:.100} is no name", hint=hint)


def _stripped(kind: str) -> dict[str, str]:
    """Return the variables for a cloud that end in a line feed, as mounted secrets do, without it.

    Raises:
        UnsupportedError: one has a control character in its middle; its value is not shown.
    """
    found: dict[str, str] = {}
    for name, value in os.environ.items():
        if not name.startswith(_PREFIXES[kind]):
            continue
        if not value.strip().isprintable():
            raise UnsupportedError(f"{name} has a line break or another control character in it", hint="set it anew")
        if value != value.strip() and value.strip():
            found[name.lower()] = value.strip()
    return found


def _same(given: Any, other: Any) -> bool:
    return given is other or (type(given) is type(other) and bool(given == other))
