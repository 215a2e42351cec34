"""Listings and steps of runs as text and as JSON: schemas, exact keys, shares, notes; long and hostile texts."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.trees import in_every_form
from tests.view.test_rows import HOSTILE, array, chain, small
from tests.view.test_rows import leaves_of as every_leaf
from treering._cli.doctor import run_doctor_json, run_doctor_lines
from treering._format.findings import Diagnosis, RunDiagnosis, StepDiagnosis
from treering._format.listing import FileRecord, LeafRecord, Listing, Named
from treering._inspect.diff import Difference, compare_listings
from treering._inspect.inspect import open_leaf_by_leaf
from treering._values.keys import join_key, split_key
from treering._view.listings import json_lines, key_json, key_lines, measure_usage, notes_of, usage_lines
from treering._view.plain import cell_width
from treering._view.rows import LONGEST_KEY, is_branch, lay_out, leaves_of, nodes_of, record_of, value_text
from treering._view.run_text import (
    RunListing,
    RunStep,
    gc_json,
    gc_lines,
    log_json,
    log_lines,
    step_lines,
    steps_json,
    when_text,
)
from treering._view.tree_text import ASCII, UNICODE, tree_lines
from treering.errors import BusyError

TOTALS = {"leaves", "arrays", "parameters", "nbytes"}


def document(tree: Any, *, globs: tuple[str, ...] = (), depth: int = 32) -> dict[str, Any]:
    layout = lay_out(tree, globs=globs, depth=depth)
    text = "\n".join(json_lines(layout, {"file": "x\udc80", "file_bytes": 200, "globs": globs, "depth": depth}))
    assert text.isascii()
    assert "\x7f" not in text
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def test_the_members() -> None:
    found = document(small())
    assert set(found) == {"schema", "file", "file_bytes", "globs", "depth", "total", "selected", "leaves", "branches"}
    assert found["schema"] == "treering.inspect/1"
    assert set(found["total"]) == set(found["selected"]) == TOTALS
    assert found["total"] == {"leaves": 9, "arrays": 4, "parameters": 18, "nbytes": 91}
    assert found["leaves"][0] == {
        "key": "params/dense/kernel",
        "kind": "array",
        "dtype": "float32",
        "shape": [2, 3],
        "nbytes": 24,
        "offset": 10,
        "value": None,
    }
    assert found["branches"] == [
        {"key": "opt/0", "kind": "map", "why": "empty", "leaves": 0, "arrays": 0, "parameters": 0, "nbytes": 0}
    ]
    values = {leaf["key"]: (leaf["kind"], leaf["value"]) for leaf in found["leaves"]}
    assert values["names/0"] == ("str", "a")
    assert values["names/1"] == ("none", None)
    assert values["names/2/1"] == ("float", 2.5)
    assert values["step"] == ("int", 7)


def test_numbers_that_json_lacks_are_text() -> None:
    found = document({"a": float("nan"), "b": 1j, "c": b"\xff", "d": True})
    assert [leaf["value"] for leaf in found["leaves"]] == ["nan", "1j", "b'\\xff'", True]


def test_folded_and_filtered() -> None:
    found = document(small(), globs=("params", "step"), depth=1)
    assert [leaf["key"] for leaf in found["leaves"]] == ["step"]
    assert [(branch["key"], branch["why"], branch["leaves"]) for branch in found["branches"]] == [
        ("params", "depth", 3)
    ]
    assert found["selected"]["leaves"] == 4
    assert (found["globs"], found["depth"]) == (["params", "step"], 1)
    nothing = document(small(), globs=("nope",))
    assert (nothing["leaves"], nothing["branches"]) == ([], [])


def test_hostile_keys_come_back_exactly() -> None:
    found = document(HOSTILE)
    assert [split_key(leaf["key"])[0] for leaf in found["leaves"]] == list(HOSTILE)
    assert split_key(found["leaves"][-1]["key"]) == ("", "")


key_names = st.text(alphabet="a~/é\x1b", max_size=3)


@given(st.recursive(st.integers(0, 5), lambda below: st.dictionaries(key_names, below, max_size=3), max_leaves=8))
def test_keys_split_back_into_paths(tree: Any) -> None:
    for leaf in document(tree)["leaves"]:
        node = tree
        for part in split_key(leaf["key"]):
            node = node[part]
        assert node == leaf["value"]


def test_depth_and_long_names_cannot_blow_it_up() -> None:
    deep = document(chain(20_000))
    assert deep["total"]["leaves"] == 20_000
    assert deep["branches"][0]["leaves"] == 19_968
    layout = lay_out({"k" * 10**6: {str(number): array(1) for number in range(1000)}})
    lines = list(json_lines(layout, {"file": "x"}))
    assert max(map(len, lines)) < 2000
    leaf = json.loads("".join(lines))["leaves"][17]
    assert leaf["key_cut"] is True
    assert leaf["key"].endswith("/17")


names = st.text(alphabet="ab~/é", max_size=2)
trees = st.recursive(
    st.integers(0, 3), lambda below: st.dictionaries(names, below, max_size=3) | st.lists(below, max_size=3)
)
globs = st.lists(st.sampled_from(["a", "**", "*", "a/*", "**/b", "*/a", "~1", "0"]), max_size=2)


@given(trees, globs)
def test_leaves_are_those_that_rows_keep(tree: Any, texts: list[str]) -> None:
    found = list(leaves_of(tree, texts))
    assert len(found) == lay_out(tree, globs=texts).kept.leaves
    if not texts:
        assert found == [(join_key(path), leaf) for path, leaf in every_leaf(tree)]
    else:
        assert set(found) <= set(leaves_of(tree))


@given(trees, st.integers(0, 3))
def test_shares_add_up(tree: Any, depth: int) -> None:
    layout = lay_out(tree, depth=depth)
    shares = measure_usage(layout)
    for member in ("nbytes", "leaves", "parameters"):
        assert sum(getattr(totals, member) for _, totals in shares) == getattr(layout.everything, member)


def test_branches() -> None:
    assert [key for key, node in nodes_of(small()) if is_branch(node)] == [
        "",
        "params",
        "params/dense",
        "params/norm",
        "opt",
        "opt/0",
        "opt/mu",
        "opt/mu/dense",
        "names",
        "names/2",
    ]


def test_deep_keys_are_cut() -> None:
    keys = [key for key, _ in leaves_of(chain(5000))]
    assert len(keys) == 5000
    assert max(map(len, keys)) == LONGEST_KEY + 1


def test_hostile_keys_reach_no_terminal() -> None:
    leaves = list(leaves_of(HOSTILE))
    lines = [*key_lines(leaves), *usage_lines(lay_out(HOSTILE), measure_usage(lay_out(HOSTILE)))]
    assert all(line.isprintable() for line in lines)
    text = "".join(key_json(leaves, {"file": "\x1b"}))
    assert text.isascii()
    assert text.isprintable()
    assert len(json.loads(text)["leaves"]) == len(HOSTILE)
    assert str(Difference(key="\x1b[2J", what="value", a="\n", b="\u202e")).isprintable()


def test_ascii_lines_are_ascii() -> None:
    leaves = [("n" * 3000, array(*[1] * 60)), ("x", "v" * 500)]
    assert all(line.isascii() for line in key_lines(leaves, ASCII))


def test_columns_stand_below_each_other() -> None:
    lines = list(key_lines(list(leaves_of(small()))))
    assert len({cell_width(line) for line in lines}) == 1
    assert list(key_lines([])) == []


def test_records_of_values() -> None:
    assert record_of("text") == LeafRecord(kind="str", dtype=None, shape=None, nbytes=4, offset=None, value="text")
    assert record_of(None).kind == "none"
    assert record_of(bytearray(3)).nbytes == 3
    assert record_of(2**100).nbytes == 13
    assert (value_text(7**20_000) or "").startswith("0x")


def test_notes_tell_where_it_came_from() -> None:
    files = [FileRecord(name=f"data-{n}", nbytes=10) for n in range(6)]
    listing = Listing(
        form="checkpoint",
        file_bytes=60,
        root=Named({}, node="other", class_name="nn.Model"),
        files=files,
        written={"by": "treering 1", "at": "now", "more": {"not": "shown"}},
        meshes=("x=8", "y=2"),
        processes=4,
        verified=True,
        metadata={"loss": float("inf")},
    )
    notes = dict(notes_of(listing))
    assert notes["written"] == "by treering 1, at now, 4 processes"
    assert notes["meshes"] == "x=8; y=2"
    assert notes["files"].endswith("data-3 (10 B) and 2 more")
    assert notes["root"] == "nn.Model"
    assert notes["metadata"] == '{"loss": "inf"}'
    lines = list(tree_lines(lay_out({"a": 1}), title="x", file_bytes=1, notes=[("a", "b\n")]))
    assert lines[1] == r"a: b\n"


def test_two_children_of_one_name_are_both_compared() -> None:
    one = Listing(form="msgpack", file_bytes=1, root={1: "a", "1": "b"})
    two = Listing(form="msgpack", file_bytes=1, root={1: "a", "1": "c"})
    assert [str(each) for each in compare_listings(one, two)] == ["1': value: 'b' in A, 'c' in B"]
    assert not list(compare_listings(one, one))


def test_static_fields_are_compared() -> None:
    def node(**static: Any) -> Listing:
        root = Named({"w": 1}, node="other", class_name="nn.Dense", static=tuple(static.items()))
        return Listing(form="checkpoint", file_bytes=1, root={"m": root}, structured=True)

    assert not list(compare_listings(node(a=1, x=float("nan")), node(a=1, x=float("nan"))))
    assert [str(each) for each in compare_listings(node(a=1, b=2), node(a=True))] == [
        "m.a: static: 1 in A, True in B",
        "m.b: static: 2 in A, not there in B",
    ]


def test_forms_that_keep_less_are_compared_on_what_they_keep() -> None:
    exact = Listing(form="checkpoint", file_bytes=1, root={"x": (1, 2), "e": {}}, structured=True)
    loose = Listing(form="msgpack", file_bytes=1, root={"x": {"0": 1, "1": 2}})
    assert not list(compare_listings(exact, loose))
    assert not list(compare_listings(loose, exact))


HOSTILE_NAME = "\x1b[2J\u202eloss\n"


def step(number: int, **more: Any) -> RunStep:
    members: dict[str, Any] = {"step": number, "path": f"run/{number}", "saved": 60.0 * number, "nbytes": 1024 * number}
    return RunStep(**members | more)


def run_listing(*steps: RunStep, **more: Any) -> RunListing:
    return RunListing(path="run", steps=steps, **more)


def test_columns_line_up() -> None:
    shown = run_listing(
        step(1, metrics={"loss": 2.0}),
        step(100, metrics={"loss": 0.123456, "accuracy": 0.5}, seconds=0.25, reasons=("the newest",)),
    )
    head, *rows = list(log_lines(shown, now=6000.0))[2:]
    assert head.split() == ["step", "age", "bytes", "save", "took", "loss", "accuracy", "kept", "by"]
    assert [row.split()[0] for row in rows] == ["100", "1"]
    at = head.index("kept by")
    assert rows[0][at:] == "the newest"
    assert head[: at - 2].endswith("accuracy")
    assert rows[0][: at - 2].endswith(" 0.5")
    assert rows[1].endswith("-")
    assert "0.12346" in rows[0]
    for lines in (list(step_lines(shown)), list(gc_lines(shown, removed=False))[:-1]):
        assert lines[0].index("1.00 KiB") + 8 == lines[1].index("100 KiB") + 7


def test_a_run_without_steps() -> None:
    assert list(step_lines(run_listing())) == []
    assert list(log_lines(run_listing(), now=0.0)) == ["run · 0 steps, 0 B", "keep: every step, no rule is noted"]
    assert list(gc_lines(run_listing(), removed=True)) == ["0 of 0 steps were removed: nothing to do"]
    for lines in (steps_json(run_listing()), log_json(run_listing(), now=0.0), gc_json(run_listing(), removed=False)):
        assert json.loads("".join(lines))["steps"] == []


def test_what_goes_and_why() -> None:
    shown = run_listing(
        step(1, kept=False, reasons=("no rule keeps it",)),
        step(2, kept=False, temporary=True, reasons=("temporary, and 3 came after it",)),
        step(3, temporary=True, reasons=("the newest",)),
        keep="KeepLast(1)",
        save_every="SaveEvery(steps=2)",
        notes=("one cannot be read",),
    )
    lines = list(log_lines(shown, now=180.0))
    assert lines[1:4] == ["keep: KeepLast(1)", "save every: SaveEvery(steps=2)", "note: one cannot be read"]
    assert lines[5].endswith("the newest (temporary)")
    assert lines[6].endswith("goes: temporary, and 3 came after it")
    assert lines[7].endswith("goes: no rule keeps it")
    *plan, total = gc_lines(shown, removed=False)
    assert [line.split()[0] for line in plan] == ["remove", "remove", "keep"]
    assert total == "2 of 3 steps would be removed, 3.00 KiB; --yes removes them"
    assert list(gc_lines(shown, removed=True))[-1] == "2 of 3 steps removed, 3.00 KiB"
    assert "temporary" in list(step_lines(shown))[2]


def test_many_metrics_are_cut_and_json_has_them_all() -> None:
    metrics = {f"m{number}": float(number) for number in range(9)}
    shown = run_listing(step(1, metrics=metrics))
    lines = list(log_lines(shown, now=0.0))
    assert lines[-1] == "and the metrics m6, m7, m8: --json has them"
    assert json.loads("".join(log_json(shown, now=0.0)))["steps"][0]["metrics"] == metrics


@pytest.mark.parametrize("style", [UNICODE, ASCII, dataclasses.replace(UNICODE, color=True, width=80)])
def test_hostile_texts_stay_in_their_line(style: Any) -> None:
    shown = run_listing(
        step(1, metrics={HOSTILE_NAME: math.nan}, kept=False, reasons=(HOSTILE_NAME,)),
        step(2, metrics={HOSTILE_NAME: -math.inf, "重み": 1.0}, reasons=("x" * 10_000,)),
        keep=HOSTILE_NAME,
        save_every=HOSTILE_NAME,
        notes=(HOSTILE_NAME,),
    )
    for lines in (
        step_lines(shown, style),
        log_lines(shown, now=0.0, style=style),
        gc_lines(shown, removed=True, style=style),
    ):
        for line in lines:
            plain = line
            for paint in ("\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[31m"):
                plain = plain.replace(paint, "") if style.color else plain
            assert plain.isprintable(), line
            assert len(plain) < 1000


def test_wide_names_take_their_columns() -> None:
    shown = run_listing(step(1, metrics={"重み": 1.0}, reasons=("the newest",)))
    head, row = list(log_lines(shown, now=0.0))[2:]
    assert cell_width(head[: head.index("kept by")]) == cell_width(row[: row.index("the newest")])


@pytest.mark.parametrize("saved", [math.inf, math.nan, -1e300, 1e18])
def test_a_time_that_no_calendar_has(saved: float) -> None:
    shown = run_listing(step(1, saved=saved))
    assert when_text(saved) == "at no known time"
    assert "at no known time" in next(step_lines(shown))
    assert json.loads("".join(steps_json(shown)))["steps"][0]["saved"] is None


def test_a_clock_that_was_set_back_shows_no_age_below_nothing() -> None:
    shown = run_listing(step(1, saved=1000.0))
    assert json.loads("".join(log_json(shown, now=10.0)))["steps"][0]["age"] == 0.0
    assert "-" not in list(log_lines(shown, now=10.0))[-1].split()[1]


def diagnosis(path: str, *problems: str) -> Diagnosis:
    return Diagnosis(path=path, committed=None, attempts=(), problems=problems, notes=())


def test_doctor_tells_of_at_most_so_many_folders() -> None:
    folders = [
        StepDiagnosis(step=number, found=diagnosis(f"run/{number}", "a file is missing")) for number in range(60)
    ]
    found = RunDiagnosis(path="run", steps=[], nbytes=0, saved=None, folders=folders, notes=())
    lines = list(run_doctor_lines(found))
    assert not found.ok
    assert lines[0] == "'run': a run of 0 steps"
    assert len(lines) == 1 + 2 * 50 + 1
    assert lines[-1] == "and 10 more folders of steps"
    document = json.loads("".join(run_doctor_json(found)))
    assert (document["ok"], document["latest"], len(document["folders"])) == (False, None, 60)
    assert document["folders"][7]["problems"] == ["a file is missing"]


def test_doctor_tells_of_steps_that_wait_for_readers_in_one_line() -> None:
    waits = [dataclasses.replace(diagnosis(f"run/{number}"), waits_for_readers=True) for number in range(3)]
    folders = [StepDiagnosis(step=number, found=found) for number, found in enumerate(waits)]
    found = RunDiagnosis(path="run", steps=[], nbytes=0, saved=None, folders=folders, notes=())
    assert list(run_doctor_lines(found))[1:] == [
        "  note: the data of 3 removed steps are still here, for readers; "
        "later the next save, or treering gc --yes, removes them; --json has each"
    ]
    assert len(json.loads("".join(run_doctor_json(found)))["folders"]) == 3
    one = dataclasses.replace(found, folders=folders[:1])
    assert list(run_doctor_lines(one))[1:] == ["'run/0': nothing is wrong"]


def test_a_file_that_is_written_into_is_named_by_its_path(tmp_path: Path) -> None:
    path = in_every_form(tmp_path)["foreign"]
    with open_leaf_by_leaf(path) as tree:
        path.write_bytes(path.read_bytes() + b"?")
        with pytest.raises(BusyError, match=rf"^'{path}' was written into"):
            tree.array(tree.listing.root["w"])[...]
