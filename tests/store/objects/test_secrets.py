"""What lets others log in stands in no text: logins, signatures and tokens of URLs."""

from __future__ import annotations

import errno
import pickle
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

import treering as tr
from tests import faults
from treering._printable import hide_secrets
from treering._store.failures import naming, with_errno
from treering._store.objects.https import WebClient
from treering._store.objects.requests import Get
from treering._store.objects.url import bucket_path, web_path
from treering.errors import NotFoundError, StoreError, TreeringError, UnsupportedError

_SECRET = st.text("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789%+-_.~/=&", min_size=12, max_size=40)
_SCHEMES = st.sampled_from(["https", "HTTP", "s3", "az", "abfss"])


@given(scheme=_SCHEMES, secret=_SECRET, before=st.sampled_from(["", "'", '"', "(", "at "]))
def test_queries_and_logins_are_hidden(scheme: str, secret: str, before: str) -> None:
    told = hide_secrets(f"could not read {before}{scheme}://host/a?X-Amz-Signature={secret}' now")
    assert secret not in told
    login = secret.replace("/", "_")
    assert login not in hide_secrets(f"{before}{scheme}://user:{login}@host/a is gone")
    assert login not in hide_secrets(f"{before}https://{login}@host/a is gone")


@given(secret=_SECRET, odd=st.sampled_from(list(" '\"\t\n")), at=st.integers(0, 12))
def test_a_query_that_no_text_could_hide_is_refused(secret: str, odd: str, at: int) -> None:
    query = f"{secret[:at]}{odd}{secret[at:]}"
    for text in (f"https://host/a?sig={query}", f"az://container/a?sig={query}"):
        with pytest.raises(UnsupportedError) as caught:
            (web_path if text.startswith("https") else bucket_path)(text)
        for told in (str(caught.value), repr(caught.value), str(caught.value.args)):
            assert len(secret) - at < 12 or secret[at:] not in told
            assert at < 12 or secret[:at] not in told.partition("?")[2]


@given(
    scheme=st.sampled_from(["https", "s3", "az", "ftp", "hf"]), secret=_SECRET, odd=st.sampled_from(list(" '\"\t\n\\"))
)
def test_no_door_shows_a_query_whatever_is_in_it(scheme: str, secret: str, odd: str) -> None:
    url = f"{scheme}://host/a?sig={secret}{odd}{secret}"
    for door in (tr.load, tr.bucket, tr.Run, lambda path: tr.save(path, {"a": 1})):
        with pytest.raises(TreeringError) as caught:
            door(url)
        error: Any = caught.value
        assert secret not in f"{error} {error!r} {error.args} {getattr(error, 'filename', '')}"


def test_the_request_that_failed_first_is_named_without_its_query(monkeypatch: pytest.MonkeyPatch) -> None:
    faults.fail(monkeypatch, WebClient, "_ask", ConnectionError("reset"))
    client = WebClient("https://host")
    client._patience, client._reached = 0.0, True
    answer = client.perform(Get("a?X-Amz-Signature=1f2e3d"))
    assert answer.reason == "GET 'https://host/a?X-Amz-Signature=1f2e3d' failed first: reset"
    error = StoreError.of(OSError(errno.EIO, answer.reason), "https://host/a", "read")
    assert "1f2e3d" not in _all_of(error)


def _all_of(error: Any) -> str:
    return f"{error} {error!r} {error.args} {error.filename} {error.strerror} {pickle.loads(pickle.dumps(error)).args}"


def test_no_attribute_of_an_error_has_a_signature() -> None:
    url = "https://host/a.safetensors?X-Amz-Signature=1f2e3d"
    errors: list[TreeringError] = [
        StoreError.of(OSError(errno.EIO, f"refused at {url}"), url, "read"),
        with_errno(NotFoundError(f"{url!r} is missing"), errno.ENOENT, url),
    ]
    with pytest.raises(StoreError) as caught, naming(url, "read"):
        raise OSError(errno.EIO, f"refused at {url}")
    assert caught.value.__cause__ is None
    for error in [*errors, caught.value]:
        assert "1f2e3d" not in _all_of(error), error


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_a_login_in_the_endpoint_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "http://me:hidden@127.0.0.1:9")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "k")
    with pytest.raises(UnsupportedError, match=f"{name} has a login before its host, '127.0.0.1'") as caught:
        tr.load("s3://bucket-with-login/a")
    assert "hidden" not in repr(caught.value)
