"""What obstore cannot do, by requests that it signs: deleting one version, and listing past foreign names.

obstore refuses a whole page for the name of another program's object that it cannot read. It signs the page of S3,
which is read here. GCS and Azure have no such signature: there the name is told.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import http.client
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, Final
from xml.etree import ElementTree

import obstore

from treering._printable import cut_middle, printable
from treering._store.objects.obstore_stores import NOWHERE
from treering._store.objects.requests import Answer, Listed, ObjectVersion, Status
from treering._values.telemetry import LOGGER

_VALID: Final = datetime.timedelta(minutes=5)
_LARGEST_PAGE: Final = 16 << 20
_LONGEST_NAME: Final = 200
_NO_XML: Final = re.compile(
    rb"[\x00-\x08\x0b\x0c\x0e-\x1f]|&#(?:0*(?:[0-8]|1[124-9]|2\d|3[01])|x0*(?:[0-8bcef]|1[\da-f]));", re.IGNORECASE
)
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")


def list_past(store: Any, reopen: Callable[[str], Any], above: str, *, deep: bool, seconds: float) -> Answer | None:
    """List a folder but for the names that obstore refuses; None where that cannot be asked for here.

    Args:
        store: the store of obstore.
        reopen: opens it for a URL in the place of that of its bucket; None where that would be another account.
        above: the folder, with the slash at its end.
        deep: whether what lies below a further slash is listed too.
        seconds: how long it may take.

    Raises:
        OSError: the pages have no end, or the server is not reached.
    """
    query = {"list-type": "2", "prefix": above, **({} if deep else {"delimiter": "/"})}
    listed: list[Listed] = []
    places: list[str] = []
    deadline = time.monotonic() + seconds
    while (page := _page(store, reopen, query)) is not None:
        for tag, member in _entries(page):
            name = member.get("Key" if tag == "Contents" else "Prefix", "")
            if not _is_readable(name):
                _tell_once(store.config["bucket"], name)
            elif tag != "Contents":
                places.append(name.removesuffix("/"))
            elif name != above:
                when = datetime.datetime.fromisoformat(member.get("LastModified", "")).timestamp()
                version = ObjectVersion(member.get("ETag") or "")
                listed.append(Listed(name.removesuffix("/"), int(member.get("Size", "")), when, version))
        token = page.findtext("{*}NextContinuationToken")
        if not token:
            return Answer(Status.DONE, listed=listed, places=places)
        if token == query.get("continuation-token") or time.monotonic() > deadline:
            raise OSError(errno.EPROTO, "the bucket lists more and more names, without an end")
        query["continuation-token"] = token
    return None


def _page(store: Any, reopen: Callable[[str], Any], query: dict[str, str]) -> ElementTree.Element | None:
    """Return one page; None where it cannot be signed or is refused."""
    if type(store).__name__ != "S3Store" or store.prefix or not signs_here(store):
        return None
    bucket = obstore.sign(store, "GET", "x", _VALID).partition("?")[0].removesuffix("/x")
    # The path that is signed comes last: servers ignore the member, which the clients of Amazon send too.
    opened = reopen(f"{bucket}?{urllib.parse.urlencode(query, quote_via=urllib.parse.quote, safe='')}&x-id=")
    if opened is None:
        return None
    url = urllib.parse.urlsplit(obstore.sign(opened, "GET", "ListObjectsV2", _VALID))
    if (connection := connect(url)) is None:
        return None
    with contextlib.closing(connection):
        try:
            connection.request("GET", f"{url.path}?{url.query}")
            answer = connection.getresponse()
            data = answer.read(_LARGEST_PAGE)
        except http.client.HTTPException as error:
            raise ConnectionError(str(error)) from error
    try:
        # What no XML may have was in a name that is left out, whichever of them it was.
        data = _NO_XML.sub(b"\x7f", data)
        return ElementTree.fromstring(data) if answer.status == http.client.OK else None  # noqa: S314 - expat bounds entities
    except ElementTree.ParseError:
        return None


def _entries(page: ElementTree.Element) -> Iterator[tuple[str, dict[str, str]]]:
    for entry in page:
        if (tag := entry.tag.rpartition("}")[2]) in {"Contents", "CommonPrefixes"}:
            yield tag, {member.tag.rpartition("}")[2]: member.text or "" for member in entry}


def _is_readable(name: str) -> bool:
    """Whether obstore takes a name."""
    return {"", ".", ".."}.isdisjoint(name.removesuffix("/").split("/")) and not _CONTROL.search(name)


@functools.lru_cache(maxsize=1000)
def _tell_once(bucket: str, name: str) -> None:
    what = printable(cut_middle(name, _LONGEST_NAME))
    LOGGER.warning("s3://%s has '%s' of another program, a name that cannot be read: it is left out", bucket, what)


_TIMEOUT: Final = 20.0
# Signed, but only by S3 and Azure: the header that GCS heeds would have to be in the signature.
_SIGNING: Final = frozenset({"S3Store", "AzureStore"})
# Servers and certificates that these requests would not know of.
_NOT_OURS: Final = frozenset({"proxy_url", "root_certificate", "allow_invalid_certificates"})
_YES: Final = frozenset({"true", "1", "yes", "on", "y"})
_NOT_TRIED: Final = Answer(Status.REFUSED, sure=False)
_STATUSES: Final = {200: Status.DONE, 202: Status.DONE, 204: Status.DONE, 404: Status.MISSING, 412: Status.REFUSED}


def delete_version(store: Any, name: str, version: ObjectVersion) -> Answer:
    """Remove an object of that version, once; where that cannot be asked for it stays: REFUSED, and not ``sure``.

    Raises:
        PermissionError: the bucket denies it.
    """
    if type(store).__name__ not in _SIGNING or not signs_here(store):
        return _NOT_TRIED
    if type(store).__name__ == "AzureStore" and urllib.parse.quote(name) != name:
        return _NOT_TRIED  # obstore signs the escaped name, which Azure answers by 403
    try:
        signed = obstore.sign(store, "DELETE", name, _VALID)
    except obstore.exceptions.GenericError:
        return _NOT_TRIED  # a SAS token of Azure signs nothing
    url = urllib.parse.urlsplit(signed)
    connection = connect(url)
    if connection is None:
        return _NOT_TRIED
    try:
        connection.request("DELETE", f"{url.path}?{url.query}", headers={"If-Match": version.e_tag})
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return Answer(Status.NO_ANSWER, reason=str(error))
    finally:
        connection.close()
    if status in {401, 403}:
        raise PermissionError(errno.EACCES, f"{name!r} may not be removed by these credentials (HTTP {status})")
    if status in _STATUSES:
        return Answer(_STATUSES[status])
    if status < 409 or status == 501:  # noqa: PLR2004 - it will not be done
        return _NOT_TRIED
    return Answer(Status.NO_ANSWER, reason=f"HTTP {status}")


def signs_here(store: Any) -> bool:
    """Tell whether what a store signs can be asked for from here."""
    options = store.client_options or {}
    if any(options.get(name, NOWHERE) != NOWHERE for name in _NOT_OURS):
        return False
    # Without signatures, obstore would look for the role of this machine to sign.
    return str(store.config.get("skip_signature", "")).lower() not in _YES


def connect(url: urllib.parse.SplitResult) -> http.client.HTTPConnection | None:
    """Connect to a server; None where that does not work from here, though it may for obstore."""
    host = url.hostname or ""
    if urllib.request.getproxies().get(url.scheme) and not urllib.request.proxy_bypass(host):
        return None
    connect = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = connect(host, url.port, timeout=_TIMEOUT)
    try:
        connection.connect()
    except OSError:
        return None
    return connection
