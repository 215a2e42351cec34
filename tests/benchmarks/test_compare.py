"""Two checkouts, measured in turns."""

import json
from pathlib import Path

import pytest

from benchmarks import compare

OLD = """
import json, pathlib, sys, time
turn = pathlib.Path("turn")
count = int(turn.read_text()) if turn.exists() else 0
turn.write_text(str(count + 1))
seconds = SECONDS[count]
job = {"workload": "A", "leaves": "jax", "group": sys.argv[1]}

def main():
    cpu = time.perf_counter is time.process_time
    print(json.dumps({"jobs": [job | {"outcomes": [
        {"case": "treering", "seconds": [seconds]}, {"case": "Orbax", "seconds": [7.0 if cpu else 1.0]}]}]}))
"""


def checkout(folder: Path, seconds: list[float]) -> Path:
    package = folder / "benchmarks"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(OLD.replace("SECONDS", json.dumps(seconds)))
    return folder


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ([1.0, 1.9, 1.0], [2.0, 2.0, 2.2], "WORSE save | A | jax | save | treering: 2 s, 2.00 [1.05-2.20] of before"),
        ([1.0, 1.0, 1.0], [1.0, 0.9, 2.0], "ok    save | A | jax | save | treering: 1 s, 1.00 [0.90-2.00] of before"),
    ],
)
def test_a_row_is_worse_where_every_turn_was(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    old: list[float],
    new: list[float],
    line: str,
) -> None:
    worse = line.startswith("WORSE")
    monkeypatch.setattr(compare, "_HERE", checkout(tmp_path / "new", new))
    assert compare.main([str(checkout(tmp_path / "old", old)), "save", "--turns", "3"]) == worse
    shown = capsys.readouterr().out.splitlines()
    assert line in shown
    assert any(row.startswith("ok    save | A | jax | save | Orbax") for row in shown)
    assert shown[-1].startswith(f"2 rows, {worse:d} worse")


@pytest.mark.benchmark
def test_other_libraries_may_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    here = Path(__file__).parents[2]
    options = ["--only", "B", "--size", "0.002", "--groups", "save"]
    compare.main([str(here), "checkpoint", "--turns", "1", "--ours", "--", *options])
    *rows, last = capsys.readouterr().out.splitlines()
    assert last.endswith("only in one checkout: none")
    assert rows
    assert all(": treering" in row.replace("| ", ": ") for row in rows)


@pytest.mark.parametrize(("options", "seconds"), [([], "1 s"), (["--cpu"], "7 s")])
def test_processor_time_may_be_compared(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    options: list[str],
    seconds: str,
) -> None:
    monkeypatch.setattr(compare, "_HERE", checkout(tmp_path / "new", [1.0]))
    compare.main([str(checkout(tmp_path / "old", [1.0])), "save", "--turns", "1", *options])
    assert f"| Orbax: {seconds}, 1.00" in capsys.readouterr().out
