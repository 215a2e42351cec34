"""Whether there are credentials for a cloud at all, asked before obstore waits for a machine that does not answer."""

from __future__ import annotations

import contextlib
import http.client
import os
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from treering.errors import PermissionDenied

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
treering.at(url, anonymous=True))""",
    "gs": """log in, or set one of these in the environment:
  gcloud auth application-default login
  export GOOGLE_SERVICE_ACCOUNT=/path/to/service-account.json
  export GOOGLE_APPLICATION_CREDENTIALS=/path/to/credentials.json
(a public bucket: treering.at(url, anonymous=True))""",
    "az": """set them in the environment:
  export AZURE_STORAGE_ACCOUNT_NAME=...
  export AZURE_STORAGE_ACCOUNT_KEY=...
  export AZURE_STORAGE_SAS_TOKEN=...  (in place of the key)
(AZURE_USE_AZURE_CLI=true takes those of the az command; a public container: treering.at(url, anonymous=True))""",
}


def require_credentials(scheme: str, bucket: str, environment: Mapping[str, str]) -> None:
    """Refuse a bucket for which neither the environment nor the machine has credentials, in at most 3 seconds.

    Args:
        scheme: ``s3``, ``gs`` or ``az``.
        bucket: the URL of the bucket.
        environment: the variables of the process.

    Raises:
        PermissionDenied: there are none; the hint has the lines to set.
    """
    if any(environment.get(name) for name in _ENOUGH[scheme]):
        return
    if scheme == "gs" and _gcloud_file(environment).exists():
        return
    with contextlib.suppress(OSError, http.client.HTTPException):
        if _machine_has_role(scheme, environment):
            return
    what = f"there are no credentials for {bucket!r}: neither the environment nor this machine has any"
    raise PermissionDenied(what, hint=_LINES[scheme])


def _gcloud_file(environment: Mapping[str, str]) -> Path:
    home = environment.get("APPDATA") if os.name == "nt" else environment.get("HOME")
    below = "gcloud" if os.name == "nt" else ".config/gcloud"
    return Path(home or "/", below, "application_default_credentials.json")


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
