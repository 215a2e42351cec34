"""A metric that no step has: never None, which loads the latest step, and never silent in a rule."""

import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import treering as tr
from tests.buckets import install
from treering.errors import NotFoundError, UnknownMetricWarning

TREE = {"w": np.arange(3.0)}


def filled(path: Path, *metrics: dict[str, float]) -> tr.Run:
    run = tr.Run(path)
    for step, each in enumerate(metrics, 1):
        run.save(step, TREE, metrics=each)
    run.wait()
    return run


@pytest.mark.parametrize(
    ("metrics", "asked", "said"),
    [
        ([{"loss": 0.5}, {"loss": 0.25}, {}], "los", "has the metric 'los'; did you mean 'loss'"),
        ([{"loss": 0.5, "accuracy": 1.0}], "f1", "has the metric 'f1'; they have 'accuracy', 'loss'"),
        ([{}, {}], "loss", "has the metric 'loss'; they have no metric"),
        ([{"loss": np.nan}, {}], "loss", "'loss' is nan in all that have it"),
    ],
)
def test_best_of_what_no_step_has_is_an_error(
    tmp_path: Path, metrics: list[dict[str, float]], asked: str, said: str
) -> None:
    run = filled(tmp_path / "run", *metrics)
    for mode in ("min", "max"):
        with pytest.raises(NotFoundError, match=said):
            run.load(run.best(asked, mode))
    run.close()


def test_best_of_a_run_without_steps_is_none(tmp_path: Path) -> None:
    assert tr.Run(tmp_path / "run").best("loss") is None


@pytest.mark.parametrize("keep", [tr.KeepBest("los"), tr.KeepLast(1) | tr.KeepBest("los", mode="max")], ids=str)
def test_a_rule_with_a_misspelt_metric_warns_once(tmp_path: Path, keep: tr.retention.Policy) -> None:
    with tr.Run(tmp_path / "run", keep=keep) as run:
        run.save(1, TREE, metrics={"loss": 0.5}).result()
        with pytest.warns(UnknownMetricWarning, match="'los'; did you mean 'loss'") as caught:
            run.save(2, TREE, metrics={"loss": 0.5})
        assert caught[0].filename == __file__
        run.save(3, TREE, metrics={"loss": 0.5})
        run.wait()
    assert run.steps() == [1, 2, 3]


def test_one_save_is_enough(tmp_path: Path) -> None:
    run = tr.Run(tmp_path / "run", keep=tr.KeepBest("los"))
    with pytest.warns(UnknownMetricWarning, match="no step has the metric of KeepBest"), run:
        run.save(1, TREE)
    run = tr.Run(tmp_path / "other", keep=tr.KeepBest("los"))
    run.save(1, TREE)
    with pytest.warns(UnknownMetricWarning):
        run.close()


def test_a_metric_that_some_step_has_is_known(tmp_path: Path) -> None:
    filled(tmp_path / "run", {"accuracy": 0.5}).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tr.Run(tmp_path / "run", keep=tr.KeepLast(2) | tr.KeepBest("accuracy")) as run:
            for step in (2, 3, 4):
                run.save(step, TREE, metrics={"loss": 0.5}).result()
    assert run.steps() == [1, 3, 4]


def test_metrics_of_a_step_ask_for_that_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = install(monkeypatch, grace=0.0)
    counts = []
    for number in (3, 30):
        run = tr.Run(f"memory://bucket/{number}")
        for step in range(number):
            run.save(step, {"step": step}, metrics={"loss": step})
        run.wait()
        counts.append(bucket.counted(partial(run.metrics, 1)))
        assert run.metrics(1) == {"loss": 1.0}
        with pytest.raises(NotFoundError, match=f"has no step {number}"):
            run.metrics(number)
    assert counts[0] == counts[1] <= 5
