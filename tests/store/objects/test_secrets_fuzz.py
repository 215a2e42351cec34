"""No door shows what lets others in, wherever in a URL it stands: errors, logs, warnings and handles are searched."""

from __future__ import annotations

import logging
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings

import treering as tr
from tests.buckets import ask_once
from tests.drawn import drawn
from tests.store.objects.web_server import WebFiles, serving
from treering.errors import TreeringError
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves

_NAME: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_SECRETS: Final = st.text(_NAME, min_size=16, max_size=24)
_LOGINS: Final = st.sampled_from(["user:{}@", "{}@", "u:{}:x@", "u:{}@x@", "u%40h:{}@", ":{}@"])
_QUERIES: Final = st.sampled_from(
    [
        "?X-Amz-Algorithm=A&X-Amz-Signature={}", "?sv=2020&sp=r&sig={}%3D", "?Signature={}&Expires=1", "?token={}",
        "?{}", "?a=1&X-Goog-Signature={}/x", "?x-amz-security-token={}", "??sig={}", "?sig={}?x", "/b?sig={}/c",
        "?sig={} x", "?sig={}'x", '?sig="{}', "?sig=\n{}", "?sig=\\'{}", "%3Fsig={}", "%3fX-Amz-Signature={}",
        ";sig={}", "#sig={}", "#access_token={}&b", "?a;AWSSecretAccessKey={}",
    ]
)  # fmt: skip
_SCHEMES: Final = st.sampled_from(["http", "HTTP", "https", "s3", "s3a", "gs", "az", "ftp", "hf", "git+ssh", "S3"])
_NAMES: Final = ["a.safetensors", "a.msgpack", "c", "gone.safetensors", "bad.safetensors", "bad.msgpack", "bad.npz"]


@st.composite
def urls(draw: st.DrawFn) -> tuple[str, str]:
    """Draw the URL of a server that is called HOST, and the secret in it."""
    secret = draw(_SECRETS)
    login = draw(st.just("") | _LOGINS)
    query = draw(_QUERIES) if not login else draw(st.just("") | _QUERIES)
    slashes = draw(st.sampled_from(["//", "//", "/"]))
    name = draw(st.sampled_from(_NAMES))
    return f"{draw(_SCHEMES)}:{slashes}{login.format(secret)}HOST/{name}{query.format(secret)}", secret


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(0)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


@pytest.fixture(scope="module")
def web() -> Iterator[WebFiles]:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        ask_once(patch)
        folder = Path(name)
        for one in ("a.safetensors", "a.msgpack", "c"):
            tr.save(folder / one, {"w": np.arange(3.0)})
        for one in _NAMES[4:]:
            (folder / one).write_bytes(b"\xff" * 100)
        with serving(folder) as files:
            yield files


def _open(url: str) -> list[str]:
    with tr.open(url) as handle:
        return [f"{each!r} {each}" for each in (handle, *(handle[key] for key in handle))]


def _run(url: str) -> Any:
    run = tr.Run(url)
    try:
        return run, repr(run), run.steps(), str(run)
    except TreeringError as error:
        raise error from ValueError(repr(run))


DOORS: Final[dict[str, Callable[[str], Any]]] = {
    "load": tr.load,
    "load like": lambda url: tr.load(url, {"other": np.zeros(3)}),
    "open": _open,
    "inspect": tr.inspect,
    "verify": tr.verify,
    "abstract": tr.abstract,
    "diff": lambda url: tr.diff(url, url),
    "convert": lambda url: tr.convert(url, "memory://converted", overwrite=True),
    "convert to": lambda url: tr.convert("memory://source", url),
    "bucket": tr.bucket,
    "Run": _run,
    "Run.save": lambda url: tr.Run(url).save(1, {"w": 1}),
    "save": lambda url: tr.save(url, {"w": 1}),
    "save_async": lambda url: tr.save_async(url, {"w": 1}).result(),
    "leaves": lambda url: tree_serialize_leaves(url, {"w": 1}),
    "leaves, load": tree_deserialize_leaves,
}


def _texts(error: BaseException | None) -> Iterator[str]:
    """Yield all that an error and what led to it can show, also after a way to another process."""
    yield "" if error is None else "".join(traceback.format_exception(error, limit=0))
    while error is not None:
        shown = (getattr(error, name, "") for name in ("filename", "strerror", "hint", "message", "__notes__"))
        yield f"{error} {error!r} {error.args} {' '.join(map(str, shown))} {vars(error)}"
        if isinstance(error, TreeringError):
            copy = pickle.loads(pickle.dumps(error))
            yield f"{copy} {copy!r} {vars(copy)}"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@settings(max_examples=drawn(200), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(drawn=urls(), doors=st.sets(st.sampled_from(sorted(DOORS)), min_size=4, max_size=4))
def test_no_door_shows_a_secret(drawn: tuple[str, str], doors: set[str], web: WebFiles) -> None:
    url, secret = drawn[0].replace("HOST", web.url.removeprefix("http://")), drawn[1]
    assume(secret not in tr.errors.__all__)  # texts of the source are drawn too, and every traceback shows these
    url = url.replace("https:", "http:")  # no server here has a certificate
    _search(url, secret, sorted(doors))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("query", ["?X-Amz-Signature={}", "?sv=1&sig={}/x", "?sig={}?x"])
def test_no_door_shows_the_signature_of_a_file_that_is_there(name: str, query: str, web: WebFiles) -> None:
    secret = "1f2e3dSECRETofAll"
    _search(f"{web.url}/{name}{query.format(secret)}", secret, sorted(DOORS))


def _search(url: str, secret: str, doors: list[str]) -> None:
    tr.save("memory://source", {"w": np.ones(2)}, overwrite=True)
    logger, log = logging.getLogger("treering"), _Log()
    level = logger.level
    logger.addHandler(log)
    logger.setLevel(1)
    try:
        for door in doors:
            texts: list[str] = []
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                try:
                    found = DOORS[door](url)
                    texts += [f"{found!r} {found if door != 'at' else ''}"]
                except (TreeringError, OSError) as error:
                    texts += _texts(error)
            texts += [str(one.message) for one in warned] + log.texts
            assert not [text for text in texts if secret in text], (door, url)
    finally:
        logger.removeHandler(log)
        logger.setLevel(level)
