"""Settings for the whole run, made before anything imports jax: a CPU with eight devices, and hypothesis' profiles."""

import collections
import gc
import itertools
import os
import re
import secrets
import signal
from collections.abc import Generator, Iterator
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.warm import Programs
    from torture.bucket_servers import BucketServer

# Eight pretended devices: shardings are tested on any machine. Both variables are read when jax starts.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# What is compiled here runs once, so XLA spends no time on making it fast: that takes a third off what compiles most.
for flag, value in {"xla_force_host_platform_device_count": 8, "xla_backend_optimization_level": 0}.items():
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{flag}={value}".strip()

# A deadline per example fails on a busy machine, not on slow code. CI draws the same examples each time.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
PROFILE = "ci" if os.environ.get("CI") else "default"
settings.load_profile(PROFILE)
# Of a property that says no number, as `quick` does it for those that say one.
FEW_EXAMPLES, ALL_EXAMPLES = 10, 100

# A shell starts what goes on in its background deaf to interrupts, and children inherit that: tests of interrupts would
# wait in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# How many processes run the tests, as pytest-xdist says.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))

# A number of its own for each folder of a test.
_numbers = itertools.count()


def pytest_configure(config: pytest.Config) -> None:
    # Read when the properties are imported: by default they draw a part of their examples.
    every = "examples" in config.option.markexpr
    if every:
        os.environ["TREERING_ALL_EXAMPLES"] = "1"
    drawn = ALL_EXAMPLES if every else FEW_EXAMPLES
    settings.register_profile("drawn", settings.get_profile(PROFILE), max_examples=drawn)
    settings.load_profile("drawn")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, object]:
    # Each of several workers begins in another room. What one has compiled the others find: without that, each compiles
    # the assertions of all rooms at the same time, where nothing is compiled yet.
    report = yield
    if collector.path == Path(__file__).parent and WORKERS > 1:
        begin = len(report.result) * int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) // WORKERS
        report.result[:] = [*report.result[begin:], *report.result[:begin]]
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    # Nearly all that is made here stays, so that looking for garbage meanwhile finds none.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    # Modules and collected tests are millions of objects that stay: no collection needs to look at them, not even once.
    gc.freeze()
    # A test is over before much garbage has come together; jax looks through its own caches at each collection.
    gc.set_threshold(20_000, 10, 10)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--store",
        choices=("posix", "bucket", "seaweed"),
        default="posix",
        help="where the tests of checkpoints and of runs save to; those about the file system itself are left out",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if WORKERS > 1:  # each has begun in another room, and all have to list the same
        items.sort(key=lambda item: item.path)
    for item in items:
        if getattr(getattr(item, "function", None), "is_hypothesis_test", False):
            item.add_marker("examples")
    asked = config.getoption("--store")
    if asked == "posix":
        _leave_cases_to_the_slow_run(items)
        return
    from tests.posix_only import why_left_out

    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        elsewhere = why_left_out(item.nodeid.removeprefix("tests/"), asked) or "tmp_path" not in getattr(
            item, "fixturenames", ()
        )
        (left if elsewhere else kept).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def _leave_cases_to_the_slow_run(items: list[pytest.Item]) -> None:
    """Mark the cases of tests with many that a default run does without; in a bucket all of them run."""
    met: collections.Counter[object] = collections.Counter()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is None:
            continue
        test = item.parent, getattr(item, "originalname", item.name)
        if met[test] % mark.args[0]:
            item.add_marker("slow")
        met[test] += 1


@pytest.fixture(scope="session")
def seaweed() -> "Iterator[BucketServer]":
    """Start a real server of objects, one for the whole run."""
    from torture.bucket_servers import open_seaweed

    with open_seaweed() as server:
        yield server


@pytest.fixture(scope="session")
def programs() -> "Iterator[Programs]":
    """Run programs to their very end, without an import of jax for each."""
    from tests.warm import Programs

    started = Programs()
    yield started
    started.close()


@pytest.fixture(scope="session")
def bucket_of_tests(request: pytest.FixtureRequest) -> PurePath:
    """Return the bucket in which tests save, in memory or on a real server; nothing waits there for readers."""

    from tests.buckets import MemoryBucket, ObstoreClient, lead_to

    url = "s3://treering-tests"
    if request.config.getoption("--store") == "bucket":
        return lead_to(MemoryBucket(url), grace=0)
    server: BucketServer = request.getfixturevalue("seaweed")
    return lead_to(ObstoreClient(server.connect(), url), grace=0)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder of the test's own, in the store that was asked for."""
    if request.config.getoption("--store") == "posix":
        # pytest's own looks through the folders of all tests before this one for a number that is free.
        name = re.sub(r"\W", "_", request.node.name)[:30]
        folder = tmp_path_factory.getbasetemp() / f"{name}-{next(_numbers)}"
        folder.mkdir(mode=0o700)
        yield folder
        return
    from tests import stores

    path = stores.BucketTestPath(request.getfixturevalue("bucket_of_tests") / secrets.token_hex(8))
    stores.install(request.getfixturevalue("monkeypatch"))
    path.mkdir()
    yield cast("Path", path)
    path.forget()
