"""Deleting one version of an object: obstore cannot, so the request is signed by it and made here."""

from __future__ import annotations

import datetime
import errno
import http.client
import urllib.parse
import urllib.request
from typing import Any, Final

import obstore

from treering._store.objects.obstore_stores import NOWHERE
from treering._store.objects.requests import Answer, ObjectVersion, Status

_VALID: Final = datetime.timedelta(minutes=5)
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
