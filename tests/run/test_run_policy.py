"""Rules as text, given to ``treering gc``: what they write, they are read from, and nothing else is."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from tests.command import inside
from tests.on_disk import RUN_DOCUMENT, signed
from treering.rules import KeepBest, KeepEvery, KeepLast, KeepLatest, KeepNear, KeepSteps, Policy

RULE_CLASSES = KeepBest, KeepEvery, KeepLast, KeepLatest, KeepNear, KeepSteps, datetime.timedelta
NAMES = {rule.__name__: rule for rule in RULE_CLASSES}
COUNTS = some.integers(1, 10**6)
RULES: some.SearchStrategy[Policy] = some.one_of(
    COUNTS.map(KeepLast),
    COUNTS.map(lambda steps: KeepEvery(steps=steps)),
    some.timedeltas(datetime.timedelta(microseconds=1), datetime.timedelta(days=400)).map(
        lambda interval: KeepEvery(interval=interval)
    ),
    some.builds(KeepBest, some.text(min_size=1, max_size=20), n=COUNTS, mode=some.sampled_from(["min", "max"])),
    some.lists(some.integers(0, 2**63 - 1), max_size=4).map(lambda steps: KeepSteps(*steps)),
    some.lists(some.integers(0, 2**63 - 1), min_size=1, max_size=4).map(KeepNear),
    some.timedeltas(datetime.timedelta(microseconds=1), datetime.timedelta(days=400)).map(
        lambda duration: KeepLatest(duration=duration)
    ),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without steps: there every metric may come yet."""
    path = tmp_path_factory.mktemp("run")
    (path / RUN_DOCUMENT).write_bytes(signed("treering_run", '"keep": null, "save_every": null, "steps": []}\n'))
    return path


@given(rules=some.lists(RULES, min_size=1, max_size=4))
def test_a_rule_is_read_from_its_own_text(run: Path, rules: list[Policy]) -> None:
    policy = rules[0]
    for rule in rules[1:]:
        policy = policy | rule
    for text in (repr(policy), f"  {policy!r} "):
        assert json.loads(inside("gc", str(run), "--keep", text, "--json", code=0)[0])["keep"] == repr(policy)
    assert eval(repr(policy), NAMES) == policy


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "KeepLast",
        "KeepLast()",
        "KeepLast(0)",
        "KeepLast(True)",
        "KeepLast(1.5)",
        "KeepLast('3')",
        "KeepLast(3) & KeepLast(2)",
        "KeepLast(3) | ",
        "KeepLast(3), KeepLast(2)",
        "KeepLast(n=3, **{})",
        "KeepLast(*[3])",
        "KeepLast(1 + 1)",
        "KeepLast([].append(3))",
        "treering.KeepLast(3)",
        "KeepWise(3)",
        "KeepEvery(interval=timedelta(weeks=-1))",
        "KeepEvery(interval=timedelta(days=10**9))",
        "KeepEvery(interval=timedelta(days=99999999999))",
        "KeepEvery(steps=3, interval=3)",
        "KeepBest('')",
        "KeepBest('loss', mode='best')",
        "KeepSteps(-1)",
        "KeepNear()",
        "KeepNear([])",
        "KeepNear([1.5])",
        "KeepNear('100')",
        "KeepNear([*[3]])",
        "KeepLatest(3)",
        "KeepLatest(duration=0)",
        "KeepLatest(duration=[3])",
        "__import__('os').system('true')",
        "KeepLast(3)\x00",
        "KeepLast(3)\nKeepLast(2)",
        "(" * 1000,
        "KeepLast(3) | " * 900 + "KeepLast(3)",
    ],
)
def test_what_is_no_rule_is_refused(run: Path, text: str) -> None:
    assert "is not a rule" in inside("gc", str(run), "--keep", text, code=2)[1]
