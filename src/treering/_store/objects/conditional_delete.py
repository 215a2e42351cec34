"""Deleting one version of an object: obstore cannot, so the request is signed by it and made here."""

from __future__ import annotations

import datetime
import errno
import http.client
import ssl
import urllib.parse
from typing import Any, Final

import obstore

from treering._store.objects.requests import Answer, ObjectVersion, Status

_VALID: Final = datetime.timedelta(minutes=5)
_TIMEOUT: Final = 20.0
# Signed, but only by S3 and Azure: the header that GCS heeds would have to be in the signature.
_SIGNING: Final = frozenset({"S3Store", "AzureStore"})
# Servers and certificates that these requests would not know of.
_NOT_OURS: Final = frozenset({"proxy_url", "root_certificate", "allow_invalid_certificates"})
_REFUSED: Final = Answer(Status.REFUSED)
_STATUSES: Final = {200: Status.DONE, 202: Status.DONE, 204: Status.DONE, 404: Status.MISSING, 412: Status.REFUSED}


def delete_version(store: Any, name: str, version: ObjectVersion) -> Answer:
    """Remove an object of that version, once; REFUSED also where that cannot be done: then it stays.

    Raises:
        PermissionError: the bucket denies it.
    """
    options = getattr(store, "client_options", None) or {}
    if type(store).__name__ not in _SIGNING or not _NOT_OURS.isdisjoint(options):
        return _REFUSED
    url = urllib.parse.urlsplit(obstore.sign(store, "DELETE", name, _VALID))
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = kind(url.hostname or "", url.port, timeout=_TIMEOUT, **_trust(url.scheme))
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
    if status in {400, 405, 501}:
        return _REFUSED
    return Answer(Status.NO_ANSWER, reason=f"HTTP {status}")


def _trust(scheme: str) -> dict[str, Any]:
    return {"context": ssl.create_default_context()} if scheme == "https" else {}
