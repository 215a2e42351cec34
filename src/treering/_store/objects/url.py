"""URLs of buckets as paths: which bucket and key each one means, and which are refused."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import PurePath, PurePosixPath
from typing import Any, Final, Self

from treering._printable import show_path
from treering.errors import UnsupportedError

# A pathlib.Path has made one slash of the two.
_BUCKET: Final = re.compile(r"(?i:(s3a?|gcs|gs|az|abfss?)):/(/[^/]+|[^/]+)(?:/(.*))?", re.DOTALL)
_WEB: Final = re.compile(r"(?i:(https?)):/(/[^/#]+|[^/#]+)(?:/([^#]*))?")
_LOOPBACK: Final = re.compile(r"(?:localhost|127\.\d+\.\d+\.\d+|\[::1\])(?::\d+)?")
_TYPO: Final = re.compile(r"(?i:(s3a?|gs|gcs|az|abfss?|memory))(?://|:)(?=[^/:])")
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_ONE_NAME: Final = {"s3a": "s3", "gcs": "gs", "abfs": "az"}
_BUCKET_NAME: Final = re.compile(r"[A-Za-z0-9_$][A-Za-z0-9._$-]*")
_AZURE_HOST: Final = re.compile(r"[A-Za-z0-9$-]+@([A-Za-z0-9]+)\.(?:dfs|blob)\.core\.windows\.net")
_AZURE: Final = "abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH"
_SIGNED: Final = re.compile(
    r"\?(?:.*&)?(?:sig|signature|token|x-amz-[a-z-]+|x-goog-[a-z-]+)=", re.IGNORECASE | re.DOTALL
)
_NO_QUERY: Final = re.compile(r"[\s'\"]")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
READ_ONLY: Final = "it is read-only; s3://, gs://, az:// and paths on disk can be written"
_WORKING: Final = "s3://, gs://, az://, memory://, file:// and, for reading, https:// work"
_INSTEAD: Final = {
    "s3n": "write s3:// instead",
    **dict.fromkeys(("azure", "adl", "wasb", "wasbs"), "write az://CONTAINER/PATH instead"),
    "hf": "huggingface_hub.snapshot_download gives a local folder, which treering.load reads",
    "r2": "write s3://BUCKET/PATH, with the endpoint of the account in AWS_ENDPOINT_URL",
}


class UrlPath(PurePosixPath):
    """A path behind a URL; nothing on disk is ever looked at for it."""

    _ROOT_PARTS = 2  # the scheme, and the bucket or host

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def __fspath__(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({show_path(str(self))!r})"

    @property
    def parent(self) -> Self:
        """The path above; a bucket, and a host, is its own."""
        return self if len(self.parts) <= self._ROOT_PARTS else super().parent

    @property
    def suffix(self) -> str:
        """The suffix of the name; that of a bucket says nothing."""
        return super().suffix if len(self.parts) > self._ROOT_PARTS else ""

    @property
    def parents(self) -> Sequence[Self]:
        """The paths above, the nearest first, the bucket or host last."""
        above: list[Self] = []
        here = self
        while here.parent is not here:
            here = here.parent
            above.append(here)
        return above


class MemoryPath(UrlPath):
    """A path in the memory of this process.

    Example:
        >>> path = MemoryPath("memory://runs/a") / "step_00000001"
        >>> str(path), path.name, str(path.parent)
        ('memory://runs/a/step_00000001', 'step_00000001', 'memory://runs/a')
    """

    _ROOT_PARTS = 1

    def __str__(self) -> str:
        # Of all of the memory, "memory:" would be a name on disk.
        return super().__str__() if self.key else "memory://"

    @property
    def key(self) -> str:
        """The name that it has in the memory: all but the scheme."""
        return "/".join(self.parts[1:])


class BucketPath(UrlPath):
    """A path in a bucket.

    Example:
        >>> path = BucketPath("s3://bucket/runs") / "step_00000001"
        >>> str(path), path.name, str(path.parent), path.bucket, path.key
        ('s3://bucket/runs/step_00000001', 'step_00000001', 's3://bucket/runs', 's3://bucket', 'runs/step_00000001')
        >>> str(BucketPath("s3://bucket").parent)
        's3://bucket'
    """

    connection: Any = None
    """What leads to the server and account, from `treering.bucket` or a call that began; None: the environment does."""

    def __reduce__(self) -> tuple[Any, ...]:
        return BucketPath if self.connection is None else self.connection.path, (str(self),)

    def __deepcopy__(self, memo: object) -> Self:
        return self

    @property
    def bucket(self) -> str:
        """The URL of the bucket alone."""
        return "//".join(self.parts[:2])

    @property
    def key(self) -> str:
        """The name in the bucket; of the bucket itself it is empty."""
        return "/".join(self.parts[2:])


class WebPath(UrlPath):
    """A path on a web server, which is read only.

    Example:
        >>> path = web_path("https://host/a/model.safetensors?key=1/2")
        >>> str(path), path.suffix, (path.parent / "b").suffix
        ('https://host/a/model.safetensors?key=1%2F2', '.safetensors', '')
    """

    @property
    def suffix(self) -> str:
        """The suffix of the name without the query."""
        return PurePosixPath(self.name.partition("?")[0]).suffix


def scheme_of(text: str) -> str | None:
    """Return the scheme of a URL in small letters; None of a path on disk.

    Example:
        >>> scheme_of("S3://bucket/a"), scheme_of("file:/a"), scheme_of("runs/a"), scheme_of("C:/a")
        ('s3', 'file', None, None)
    """
    found = _SCHEME.match(text)
    return None if found is None else text[: found.end() - 2].lower()


def url_meant(text: str) -> str | None:
    """Return the URL that a path on disk was probably meant to be.

    Example:
        >>> url_meant("s3//bucket/a"), url_meant("gs:bucket"), url_meant("s3/bucket")
        ('s3://bucket/a', 'gs://bucket', None)
    """
    found = _TYPO.match(text)
    return None if found is None else f"{found[1]}://{text[found.end() :]}"


def bucket_path(url: str | PurePath) -> BucketPath:
    """Return the path that the URL of something in a bucket means. Its key is what is written: ``%20`` is no space.

    Raises:
        UnsupportedError: it is of another kind, or names no bucket, or no object can have the name.

    Example:
        >>> str(bucket_path("s3a://bucket//a/b c%20#1/")), bucket_path("gs://bucket").key
        ('s3://bucket/a/b c%20#1', '')
    """
    text = os.fspath(url)
    found = _BUCKET.fullmatch(text)
    if found is None:
        raise _no_bucket(text)
    scheme = found[1].lower()
    bucket = found[2].removeprefix("/")
    if "@" in bucket and not (scheme in {"abfs", "abfss"} and _AZURE_HOST.fullmatch(bucket)):
        known = f"credentials come from the environment or from treering.bucket; Azure: {_AZURE}"
        raise UnsupportedError(f"a URL of {scheme}:// has an '@' before its path", hint=known)
    if scheme == "abfss" and "@" not in bucket:
        raise UnsupportedError(f"{text!r} has no account", hint=f"write az://CONTAINER/PATH, or {_AZURE}")
    if "@" not in bucket and not _BUCKET_NAME.fullmatch(bucket):
        what = f"{text!r} names no bucket: {bucket!r} is no name of one"
        raise UnsupportedError(what, hint="a URL is s3://BUCKET/PATH")
    key = found[3] or ""
    _require_name(text, key)
    if _SIGNED.search(key):
        what = f"{text.partition('?')[0]!r} is followed by a signature, which no bucket reads"
        raise UnsupportedError(what, hint="credentials come from the environment or from treering.bucket")
    scheme = "abfss" if "@" in bucket else _ONE_NAME.get(scheme, scheme)
    return BucketPath(f"{scheme}://{bucket}/{key}")


def memory_path(url: str) -> MemoryPath:
    """Return the path that the URL of something in the memory of this process means.

    Raises:
        UnsupportedError: no object of a bucket can have the name.
    """
    path = MemoryPath(url)
    _require_name(url, path.key)
    return path


def _require_name(text: str, key: str) -> None:
    if ".." in key.split("/"):
        raise UnsupportedError(f"{text!r} has '..' in it, which nothing in a bucket follows", hint="write the path out")
    if _CONTROL.search(key):
        raise UnsupportedError(f"{text!r} has a control character in it", hint="give the object another name")


def web_path(url: str | PurePath) -> WebPath:
    """Return the path that the URL of something on a web server means; a query stays a part of its last name.

    Raises:
        UnsupportedError: it is not encrypted and not on this machine, or has a part that no server sees.
    """
    text = os.fspath(url)
    address, mark, query = text.partition("?")
    found = _WEB.fullmatch(address)
    if _NO_QUERY.search(query):  # nobody could tell where it ends, and a message would show the rest of a signature
        raise UnsupportedError(f"the query of {address!r} has a space or a quote in it", hint="write %20, %27 or %22")
    if found is None:
        hint = "a URL is https://HOST/PATH, without '#'"
        raise UnsupportedError(f"{text!r} is no URL of a file or folder", hint=hint)
    scheme, host, key = found[1].lower(), found[2].removeprefix("/"), found[3] or ""
    if scheme == "http" and not _LOOPBACK.fullmatch(host):
        raise UnsupportedError(f"{text!r} is not encrypted", hint="use https://; http:// is for this machine alone")
    if "@" in host or {"", ".", ".."} & set(key.removesuffix("/").split("/")[:-1] or ["x"]):
        what = f"the host of a {scheme}:// URL has a login, or its path an empty part or '..'"
        raise UnsupportedError(what, hint="a URL is https://HOST/PATH")
    return WebPath(f"{scheme}://{host}/{key}{mark}{query.replace('/', '%2F')}")


def _no_bucket(text: str) -> UnsupportedError:
    scheme = scheme_of(text) or text
    if scheme in {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}:
        return UnsupportedError(f"{text!r} names no bucket", hint=f"a URL is {scheme}://BUCKET/PATH")
    if scheme in {text, "memory", "file", "http", "https"}:  # only treering.bucket asks for these here
        hint = "options are for s3://, gs:// and az://; pass every other path as it is"
        return UnsupportedError(f"{text!r} is not in a bucket that has options", hint=hint)
    return UnsupportedError(f"{text!r} is a URL that treering cannot use", hint=_INSTEAD.get(scheme, _WORKING))
