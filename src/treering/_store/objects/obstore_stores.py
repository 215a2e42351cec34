"""The same bucket opened in several ways: how long a request may take depends on its size."""

from __future__ import annotations

import datetime
import errno
import math
import os
import re
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any, Final, TypeVar

from treering._store.objects.requests import PATIENCE

T = TypeVar("T")

_SLOWEST: Final = 256 << 10
"""Bytes that a connection moves in a second, at least."""

_SMALL: Final = 1 << 20
_LONGEST: Final = 64 << 20
_STALLED: Final = 20
"""Seconds without a byte after which a request has failed."""

_ENDPOINTS: Final = ("aws_endpoint_url_s3", "endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url")
_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})
_VARIABLES: Final = {"S3Store": "AWS_", "GCSStore": "GOOGLE_", "AzureStore": "AZURE_"}
_READ: Final = ("AWS_", "GOOGLE_", "AZURE_", "IDENTITY_", "GCE_METADATA_HOST")
_HOMES: Final = ("HOME", "APPDATA")
_CLIENT_OPTIONS: Final = (
    "allow_http", "allow_invalid_certificates", "connect_timeout", "http1_only", "http2_only", "pool_idle_timeout",
    "pool_max_idle_per_host", "proxy_ca_certificate", "proxy_excludes", "proxy_url", "read_timeout", "user_agent",
)  # fmt: skip
"""Options of the connection that obstore reads from the environment, but not beside others that it is given."""
NOWHERE: Final = "http://127.0.0.1:0"
"""A proxy that cannot be."""
_PROXIES: Final = frozenset({"http", "https", "all"})
_HOST: Final = re.compile(r"https?://(?:\[([^\s\]]+)|([^\s\[/:?#,]+))", re.IGNORECASE)
_OF_CREDENTIALS: Final = ("169.254.0.0/16", "fd00:ec2::/32", "sts.amazonaws.com")
_UNSIGNED: Final = frozenset({"unsigned_payload", "aws_unsigned_payload"})
_FIRST_PAUSE: Final = 0.5
_RENEWED_EVERY: Final = 60.0
_users: Final[dict[str, int]] = {}
"""The process that first used a bucket, of this one and those that it was forked from."""


class StoreVariants:
    """One store of obstore, opened again with other timeouts and retries when they are first needed.

    obstore takes from the environment of that moment what a store was not given, such as the server and the keys. So
    it is opened only while the environment is what it was at the beginning. Afterwards those serve that are open: two
    of them, which may take the longest, are from the beginning.

    Args:
        store: the store; one that has no such options is used as it is.
        timeout: seconds for a small request.
        patience: seconds after which no part is sent again, but for the time that one may stay without an answer.
    """

    def __init__(self, store: Any, timeout: float, patience: float = PATIENCE) -> None:
        self.store = store
        self._timeout = timeout
        self._patience = patience
        self._lock = threading.Lock()
        self._renewed = -math.inf
        self._environment = store_environment()
        self._opened = self._open_longest() if hasattr(store, "client_options") else {}

    def renew(self) -> bool:
        """Forget all but the store itself, so that credentials are asked for anew; False where that was just done."""
        with self._lock:
            if not self._opened or time.monotonic() - self._renewed < _RENEWED_EVERY:
                return False
            if (opened := self._while_unchanged(self._open_again)) is None:
                return False
            self._opened = opened
            return True

    def variant(self, nbytes: int, *, parts: bool = False) -> Any:
        """Return it for a request that moves so many bytes and is made once, or for ``parts``, which it repeats."""
        if not hasattr(self.store, "client_options"):
            return self.store
        _require_own_threads()
        # Rounded up, so that there are few of them.
        size = 0 if nbytes <= _SMALL else 1 << (nbytes - 1).bit_length()
        with self._lock:
            if (size, parts) not in self._opened:
                opened = self._while_unchanged(lambda: self._open(size, parts=parts))
                if opened is not None:
                    self._opened[size, parts] = opened
            return self._opened.get((size, parts), self._opened[_LONGEST, parts])

    def at_url(self, url: str) -> Any:
        """Open the store of S3 for a URL in the place of that of its bucket; None once the environment is another."""
        config = {name: value for name, value in config_of(self.store).items() if name not in _ENDPOINTS}
        config |= {_ENDPOINTS[0]: url, "virtual_hosted_style_request": True}
        return self._while_unchanged(lambda: self._open(0, parts=False, config=config))

    def _while_unchanged(self, opening: Callable[[], T]) -> T | None:
        """Return what is opened while the environment is what it was at the beginning, else None."""
        opened = opening() if store_environment() == self._environment else None
        return opened if store_environment() == self._environment else None

    def _open_again(self) -> dict[tuple[int, bool], Any]:
        self._renewed = time.monotonic()  # also where it cannot be opened: then what was denied is told
        return self._open_longest()

    def _open_longest(self) -> dict[tuple[int, bool], Any]:
        return {(_LONGEST, parts): self._open(_LONGEST, parts=parts) for parts in (False, True)}

    def _open(self, size: int, *, parts: bool, config: dict[str, Any] | None = None) -> Any:
        store, timeout = self.store, self._timeout + size / _SLOWEST
        options = {"read_timeout": f"{_STALLED}s", **environment_options(type(store).__name__)}
        options |= store.client_options or {}
        options["timeout"] = f"{round(timeout * 1000)}ms"
        config = config_of(store) if config is None else config
        if type(store).__name__ == "S3Store":
            options |= _without_redirects(config, options)
            if parts and _UNSIGNED.isdisjoint(config) and is_private(config):
                config["unsigned_payload"] = True
        second = datetime.timedelta(seconds=1)
        retries = {
            "max_retries": math.ceil(self._patience / _FIRST_PAUSE) if parts else 0,  # so that time alone ends them
            "retry_timeout": max(self._patience - _STALLED, 1) * second,
            "backoff": {"init_backoff": _FIRST_PAUSE * second, "max_backoff": 15 * second, "base": 2},
        }
        provider = {} if store.credential_provider is None else {"credential_provider": store.credential_provider}
        return type(store)(prefix=store.prefix, config=config, client_options=options, retry_config=retries, **provider)


def _require_own_threads() -> None:
    """Refuse what would wait forever: a forked process has none of the threads of obstore.

    Raises:
        OSError: the process that it was forked from has used a bucket.
    """
    if _users.setdefault("first", os.getpid()) != os.getpid():
        hint = "start it by 'spawn' or 'forkserver'"
        raise OSError(errno.ENOTSUP, f"this process was forked from one that has used a bucket, and cannot: {hint}")


def store_environment() -> dict[str, str]:
    """Return what the environment says that stores of obstore may read."""
    return {name: value for name, value in os.environ.items() if name.startswith(_READ) or name in _HOMES}


def environment_options(kind: str) -> dict[str, str]:
    """Return the options of the connection that the environment has for a kind of store.

    Example:
        >>> environment_options("MemoryStore")
        {}
    """
    prefix = _VARIABLES.get(kind)
    names = {} if prefix is None else {f"{prefix}{option.upper()}": option for option in _CLIENT_OPTIONS}
    return {option: os.environ[name] for name, option in names.items() if os.environ.get(name)}


def config_of(store: Any) -> dict[str, Any]:
    """Return the options of a store as obstore takes them: it tells one by a name that it does not take.

    Example:
        >>> import obstore.store
        >>> config_of(obstore.store.S3Store("bucket", aws_endpoint_url_s3="https://host"))["aws_endpoint_url_s3"]
        'https://host'
    """
    return {_ENDPOINTS[0] if name == "endpoint_url_s3" else name: value for name, value in store.config.items()}


def is_private(config: dict[str, Any]) -> bool:
    """Tell whether what is sent to an endpoint cannot change on the way unnoticed: by https, or inside this machine.

    Example:
        >>> is_private({"endpoint": "http://127.0.0.1:80"}), is_private({"endpoint": "http://10.0.0.1"})
        (True, False)
    """
    return all(url.scheme == "https" or url.hostname in _LOOPBACK for url in _endpoints_of(config))


def _endpoints_of(config: dict[str, Any]) -> list[urllib.parse.SplitResult]:
    found = [config.get(key) or os.environ.get(f"AWS_{key.removeprefix('aws_').upper()}") for key in _ENDPOINTS]
    return [urllib.parse.urlsplit(str(url)) for url in found if url]


def _without_redirects(config: dict[str, Any], options: dict[str, Any]) -> dict[str, str]:
    """Return the options by which a client of S3 follows its endpoint to no other host, with the token of the session.

    obstore has none for that. So what is not for the endpoint, or for those who give credentials, goes to a proxy that
    does not exist; where there is another proxy, only the first look of `connect` tells of a redirect.
    """
    if not _endpoints_of(config) or "proxy_url" in options or not _PROXIES.isdisjoint(urllib.request.getproxies()):
        return {}
    told = [*config.values(), *(value for name, value in os.environ.items() if name.startswith("AWS_"))]
    hosts = ["".join(found) for found in _HOST.findall(" ".join(map(str, told)))]
    regions = [value for name, value in config.items() if name.endswith("region")]
    regions += [os.environ.get(name) or "us-east-1" for name in ("AWS_REGION", "AWS_DEFAULT_REGION")]
    hosts += [f"sts.{region}.amazonaws.com" for region in regions]
    return {"proxy_url": NOWHERE, "proxy_excludes": ",".join(dict.fromkeys([*hosts, *_OF_CREDENTIALS]))}


def was_led_away(details: str) -> bool:
    """Tell from the details of an error whether the endpoint has sent a request on to another host."""
    return f" {NOWHERE.removeprefix('http://')}," in details
