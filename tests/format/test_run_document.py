"""What a run writes about its steps, and how readers take documents that treering did not write."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import on_disk
from tests.compat import independent_run_reader
from treering._codec.documents import SignedForm
from treering._format.document import read_digest, read_names, read_summary
from treering._format.run_document import (
    LATEST_TIME,
    Conversion,
    HandedSteps,
    Resumes,
    RunDocument,
    StepNote,
    StepOrigin,
    StepRecord,
    SupersededSteps,
    add_note,
    encode_handed,
    encode_run,
    encode_superseded,
    find_note,
    parse_handed,
    parse_lease,
    parse_run,
    parse_superseded,
    remove_note,
)
from treering._values.checkpoint_names import HIGHEST_STEP
from treering._values.checksums import digest
from treering.errors import CorruptError, FormatError, UnsupportedError

RECORD = StepRecord(
    step=1200,
    attempt="0123456789abcdef",
    saved=1.5,
    metrics={"loss": 0.25},
    temporary=False,
    nbytes=4096,
    seconds=0.5,
    index_nbytes=900,
    digest="xxh3-128:" + "0" * 32,
)
FORM = SignedForm(member="treering_run", version=1, name="run.json", hint="")

numbers = st.floats()
times = st.integers(0, int(LATEST_TIME) * 1000).map(lambda milliseconds: milliseconds / 1000)
steps = st.integers(0, HIGHEST_STEP)
metrics = st.dictionaries(st.text(), numbers, max_size=4)


def same(one: Any, other: Any) -> bool:
    """Equal, nan among the numbers too."""
    return repr(one) == repr(other)


@given(
    step=steps,
    saved=times,
    metrics=metrics,
    temporary=st.booleans(),
    branch=st.none() | st.builds(StepOrigin, st.text(), steps),
)
def test_a_note_comes_back_through_json(**members: Any) -> None:
    note = StepNote(**members)
    metadata = json.loads(json.dumps(add_note({"mine": [1]}, note), allow_nan=False))
    assert same(find_note(metadata), note)
    assert remove_note(metadata) == {"mine": [1]}


@given(
    records=st.lists(
        st.builds(
            StepRecord,
            step=steps,
            attempt=st.from_regex(r"[0-9a-f]{16}", fullmatch=True),
            saved=times,
            metrics=metrics,
            temporary=st.booleans(),
            nbytes=st.integers(0, 1 << 63),
            seconds=st.none() | st.floats(0, 1e9),
            index_nbytes=st.integers(0, 1 << 31),
            digest=st.from_regex(r"xxh3-128:[0-9a-f]{32}", fullmatch=True),
        ),
        unique_by=lambda record: record.step,
        max_size=5,
    ),
    keep=st.none() | st.text(),
    save_every=st.none() | st.text(),
)
def test_a_document_comes_back(records: list[StepRecord], keep: str | None, save_every: str | None) -> None:
    document = RunDocument(keep, save_every, tuple(sorted(records, key=lambda record: record.step)))
    assert same(parse_run(encode_run(document)), document)


def test_what_is_not_finite_is_text() -> None:
    note = StepNote(step=0, saved=0.0, metrics={"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1})
    assert add_note({}, note)["treering"]["metrics"] == {"a": "nan", "b": "inf", "c": "-inf", "d": 1.0}


def test_the_users_metadata_may_not_have_the_runs_member() -> None:
    with pytest.raises(UnsupportedError, match="'treering'"):
        add_note({"treering": None}, StepNote(step=0, saved=0.0))


@pytest.mark.parametrize("saved", [math.nan, math.inf, 1e18, -1e18])
def test_a_time_that_is_none_is_refused(saved: float) -> None:
    with pytest.raises(UnsupportedError, match="as a time"):
        add_note({}, StepNote(step=0, saved=saved))


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1},
        {"step": 1 << 63},
        {"step": True},
        {"step": 1.0},
        {"step": None},
        {"saved": 1.0},
        {"saved": "2026-11-21"},
        {"saved": "2026-13-21T00:00:00.000000Z"},
        {"saved": "٢٠٢٦-11-21T00:00:00.000000Z"},
        {"metrics": []},
        {"metrics": {"a": "NaN"}},
        {"metrics": {"a": True}},
        {"metrics": {"a": 10**400}},
        {"metrics": {"a": [1]}},
        {"temporary": 0},
        {"branch": 1},
        {"branch": {"run": 1, "step": 1}},
        {"branch": {"run": "a", "step": -1}},
    ],
    ids=str,
)
def test_a_note_that_is_none_counts_as_the_users(change: dict[str, Any]) -> None:
    metadata = add_note({}, StepNote(step=3, saved=0.0))
    metadata["treering"] |= change
    assert find_note(metadata) is None
    assert remove_note(metadata) == metadata


def signed(steps: Any, **members: Any) -> bytes:
    return FORM.encode([*({"keep": None, "save_every": None} | members).items(), ("steps", steps)])


def node(**change: Any) -> dict[str, Any]:
    (line,) = re.findall(rb'"steps": \[(.*)\]\}', encode_run(RunDocument(None, None, [RECORD])))
    return json.loads(line) | change


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        encode_run(RunDocument())[:-2],
        encode_run(RunDocument(keep="KeepLast(3)")).replace(b"3)", b"4)"),
        signed({}),
        signed([3]),
        signed([{}]),
        signed([node(step=-1)]),
        signed([node(attempt="../../etc/passwd")]),
        signed([node(index_digest="")]),
        signed([node(nbytes=-1)]),
        signed([node(nbytes=1e3)]),
        signed([node(seconds="1")]),
        signed([node(seconds=10**400)]),
        signed([node(seconds=-1)]),
        signed([node(saved="now")]),
        signed([node(metrics={"loss": "high"})]),
        signed([node(), node()]),
        signed([node(step=2), node(step=1)]),
        signed([], keep=3),
        signed([], save_every=["a"]),
        FORM.encode([("keep", None)]),
    ],
    ids=range(22),
)
def test_a_document_that_contradicts_itself_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError, match=r"run\.json"):
        parse_run(data)


def test_a_newer_document_is_said_to_be_one() -> None:
    newer = dataclasses.replace(FORM, version=2).encode([("keep", None), ("steps", [])])
    with pytest.raises(FormatError, match="newer"):
        parse_run(newer)


# ---------------------------------------------------------------------------------------------------- an index, glanced


def index(*lines: str, version: int = 1) -> bytes:
    head, body = f'{{"treering": {version}, "digest": "', '",\n' + ",\n".join(lines) + "}\n"
    return f"{head}{digest((head.encode(), body.encode()))}{body}".encode()


ATTEMPT = '"attempt": "0123456789abcdef"'
FILES = '"files": [{"name":"data-a","nbytes":5},{"name":"data-b","nbytes":7}]'
REPLACES = '"replaces": ["data-c"]'
METADATA = '"metadata": {"note":"\\n\\"attempt\\": \\"x\\","}'


def test_the_members_that_do_not_grow_are_found_on_their_lines() -> None:
    data = index(ATTEMPT, '"leaves": {}', FILES, REPLACES, METADATA)
    found = read_summary(data)
    assert (found.attempt, found.names, found.nbytes) == (
        "0123456789abcdef",
        ("data-a", "data-b", "data-c"),
        12 + len(data),
    )
    assert found.metadata == {"note": '\n"attempt": "x",'}
    assert found.digest == read_digest(data[:96])
    assert read_names(data) == found.names


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        index(ATTEMPT, FILES, REPLACES, METADATA)[:-1],
        index(ATTEMPT, FILES, REPLACES, METADATA).replace(b"data-a", b"data-x"),
        index(FILES, REPLACES, METADATA),
        index(ATTEMPT, ATTEMPT, FILES, REPLACES, METADATA),
        index(ATTEMPT, FILES, REPLACES, '"metadata": {', '"files": []', "}"),
        index('"attempt": "../../up"', FILES, REPLACES, METADATA),
        index(ATTEMPT, '"files": [{"name":"a","nbytes":-1}]', REPLACES, METADATA),
        index(ATTEMPT, '"files": [{"name":3,"nbytes":1}]', REPLACES, METADATA),
        index(ATTEMPT, f'"files": [{{"name":"a","nbytes":{1 << 63}}}]', REPLACES, METADATA),
        index(ATTEMPT, '"files": 3', REPLACES, METADATA),
        index(ATTEMPT, FILES, '"replaces": [3]', METADATA),
        index(ATTEMPT, FILES, REPLACES, '"metadata": []'),
        index(ATTEMPT, FILES, REPLACES, '"metadata": ' + "[" * 100_000),
        index(ATTEMPT, FILES, REPLACES, '"metadata": NaN'),
    ],
    ids=range(16),
)
def test_a_damaged_index_is_corrupt_at_a_glance_too(data: bytes) -> None:
    with pytest.raises(CorruptError):
        read_summary(data)


def test_a_newer_index_is_said_to_be_one() -> None:
    with pytest.raises(FormatError, match="newer"):
        read_summary(index(ATTEMPT, FILES, REPLACES, METADATA, version=2))


PAGE = Path(__file__).parents[2] / "docs" / "spec" / "run.md"


def test_the_examples_of_the_specification() -> None:
    text = PAGE.read_text(encoding="utf-8")
    note, document, list_of_left, resumed, lease, stamp, handed, converted = re.findall(
        r"```json\n(.*?)```", text, re.DOTALL
    )
    metadata = json.loads(note)
    found = find_note(metadata)
    assert found is not None
    assert (found.step, math.isnan(found.metrics["loss"]), metadata["git"]) == (1200, True, "abc")
    assert add_note({"git": "abc"}, found) == metadata
    metadata["treering"]["converted"] = json.loads(converted)
    told = find_note(metadata)
    assert told is not None
    assert told.converted == Conversion(**json.loads(converted))
    assert add_note({"git": "abc"}, told) == metadata
    assert encode_run(parse_run(document.encode())) == document.encode()
    steps = independent_run_reader.signed(document.encode(), "treering_run")["steps"]
    assert [step["step"] for step in steps] == [1000, 1200]
    assert encode_superseded(parse_superseded(list_of_left.encode())) == list_of_left.encode()
    assert parse_lease(lease.encode()) == "node-1 (process 77)"
    assert parse_superseded(stamp.encode()) == SupersededSteps(leases=True)
    assert parse_handed(handed.encode()).through == 1200
    assert Resumes.parse(resumed.encode()).encode() == resumed.encode()


# ------------------------------------------------------------------------------------------- steps that are left behind

SUPERSEDED = SupersededSteps(step=10, mark="0123456789abcdef", left={20: "f" * 16, 30: None})
attempts_left = st.none() | st.text("0123456789abcdef", min_size=16, max_size=16)


def signed_list(list_node: dict[str, Any], version: int = 1) -> bytes:
    head = f'{{"treering_left": {version}, "digest": "'
    body = '",\n' + json.dumps(list_node)[1:] + "\n"
    return f"{head}{digest((head.encode(), body.encode()))}{body}".encode()


def list_node(**changed: Any) -> dict[str, Any]:
    left = [{"step": 20, "attempt": "f" * 16}, {"step": 30, "attempt": None}]
    return {"step": 10, "mark": "0123456789abcdef", "left": left} | changed


@given(st.integers(0, 2**40), st.dictionaries(st.integers(2**40 + 1, HIGHEST_STEP), attempts_left, max_size=5))
def test_a_list_comes_back(step: int, left: dict[int, str | None]) -> None:
    document = SupersededSteps(step=step, mark="0" * 16, left=left)
    assert parse_superseded(encode_superseded(document)) == document


def test_a_signed_list_is_read() -> None:
    assert parse_superseded(signed_list(list_node())) == SUPERSEDED


@pytest.mark.parametrize(
    "changed",
    [
        {"step": -1},
        {"step": True},
        {"step": 20},
        {"mark": "xyz"},
        {"mark": None},
        {"left": {}},
        {"left": [{"step": 20}]},
        {"left": [{"step": 20, "attempt": "short"}]},
        {"left": [{"step": 20, "attempt": 7}]},
        {"left": ["20"]},
        {"left": [20]},
        {"left": [None]},
    ],
)
def test_a_list_that_contradicts_itself_is_damaged(changed: dict[str, Any]) -> None:
    with pytest.raises(CorruptError, match=r"\.run\.json\.left"):
        parse_superseded(signed_list(list_node(**changed)))


def test_a_list_that_was_not_written_to_its_end_is_damaged() -> None:
    data = encode_superseded(SUPERSEDED)
    for end in range(len(data)):
        with pytest.raises(CorruptError):
            parse_superseded(data[:end])


def test_a_newer_list_is_refused() -> None:
    with pytest.raises(FormatError, match="is of version 3"):
        parse_superseded(signed_list(list_node(), version=3))


def test_a_stamp_supersedes_nothing_and_versions_before_refuse_it() -> None:
    stamp = encode_superseded(SupersededSteps(leases=True))
    assert stamp.startswith(b'{"treering_left": 2, ')
    assert parse_superseded(stamp) == SupersededSteps(leases=True)
    both = dataclasses.replace(SUPERSEDED, leases=True)
    assert parse_superseded(encode_superseded(both)) == both


@pytest.mark.parametrize(
    "body",
    [
        '"through": -2, "without": []}',
        '"through": true, "without": []}',
        '"through": 9223372036854775808, "without": []}',
        '"through": 1, "without": {}}',
        '"through": 1, "without": [{"step": 1, "digest": "x"}]}',
        '"through": 1, "without": [1]}',
        '"without": []}',
    ],
)
def test_a_record_of_handed_steps_that_contradicts_itself_is_damaged(body: str) -> None:
    with pytest.raises(CorruptError):
        parse_handed(on_disk.signed("treering_handed", body))


def test_the_steps_that_were_not_handed_over_are_bounded() -> None:
    digest = "xxh3-128:" + "0" * 32
    document = HandedSteps(5000, dict.fromkeys(range(3000), digest))
    assert sorted(parse_handed(encode_handed(document)).without) == list(range(2000, 3000))


# ------------------------------------------------------------------------------------------------- .run.json.resumed

attempts = st.from_regex(r"[0-9a-f]{16}", fullmatch=True)
RESUMED = SignedForm(member="treering_resumed", version=1, name=".run.json.resumed", hint="")


@given(
    passed=st.dictionaries(steps, st.none() | attempts, max_size=4),
    counts=st.dictionaries(st.tuples(steps, attempts), st.integers(0, 1 << 63), max_size=4),
)
def test_what_was_noted_of_resumes_comes_back(
    passed: dict[int, str | None], counts: dict[tuple[int, str], int]
) -> None:
    assert Resumes.parse(Resumes(passed, counts).encode()) == Resumes(passed, counts)


def test_of_very_many_the_highest_are_noted() -> None:
    document = Resumes(dict.fromkeys(range(5000)), {(step, "f" * 16): 1 for step in range(5000)})
    found = Resumes.parse(document.encode())
    assert list(found.passed) == [step for step, _ in found.counts] == list(range(4000, 5000))


@pytest.mark.parametrize(
    ("passed", "resumed"),
    [
        ({}, []),
        ([1], []),
        ([{"step": -1, "attempt": None}], []),
        ([{"step": 1}], []),
        ([{"step": 1, "attempt": "../../etc/passwd"}], []),
        ([], None),
        ([], [{"step": 1, "attempt": None, "count": 1}]),
        ([], [{"step": 1, "attempt": "f" * 16}]),
        ([], [{"step": 1, "attempt": "f" * 16, "count": -1}]),
        ([], [{"step": 1, "attempt": "f" * 16, "count": True}]),
        ([], [{"step": 1, "attempt": "f" * 16, "count": 1 << 64}]),
        ([{"step": step, "attempt": None} for step in range(1001)], []),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_contradicts_itself_says_nothing_of_resumes(passed: Any, resumed: Any) -> None:
    with pytest.raises(CorruptError, match=r"\.run\.json\.resumed.*remove it"):
        Resumes.parse(RESUMED.encode([("passed", passed), ("resumed", resumed)]))


def test_a_newer_version_of_what_was_noted_is_said_so() -> None:
    newer = dataclasses.replace(RESUMED, version=2).encode([("passed", []), ("resumed", [])])
    with pytest.raises(FormatError, match="version 2"):
        Resumes.parse(newer)
