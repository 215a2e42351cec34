"""Two real processes save through jax's own manager of asynchronous checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import treering
from tests.leaves.managed_workers import tree_of, with_managers
from tests.leaves.saved import index_at, stored, visible
from tests.multiprocess.jobs import results, run_job
from treering.leaves import index_leaves


@pytest.mark.slow
def test_jax_s_own_manager(tmp_path: Path) -> None:
    (tmp_path / "taken" / "rows").mkdir(parents=True)
    (tmp_path / "taken" / "rows" / "2.0").write_bytes(b"mine")
    first, second = results(run_job(with_managers, 2, arguments=[str(tmp_path)], timeout=120))
    assert (first["called"], second["called"]) == (["None", "None", "model"], [])
    assert set(index_at(tmp_path / "ckpt")["prefixes"]) == {"model", "last"}
    for path, prefix in ((tmp_path / "ckpt", None), (tmp_path / "ckpt", "model"), (tmp_path / "later", None)):
        if path.name == "later":
            assert not (path / "tensorstore_index.json").exists()
            index_leaves(path)
        found = stored(path, prefix)
        for name, wanted in tree_of().items():
            assert np.array_equal(np.asarray(found[name]), wanted), name
        assert np.asarray(found["own"]).tolist() == [0, 1, 2]
        assert treering.verify(path).ok
    for name, text in {
        "alone": "works with all processes",
        "compressor": "not by a manager",
        "arguments": "different arguments",
    }.items():
        assert text in first[name]
        assert text in second[name]
    # The manager wrote in its own way, compressed; what each process holds alone is not its to write.
    compressors = {
        name: json.loads((tmp_path / "ckpt" / name / ".zarray").read_text())["compressor"] for name in ("rows", "own")
    }
    assert compressors["rows"] is not None
    assert compressors["own"] is None
    assert first["taken"].startswith("ExistsError:")
    assert second["taken"] != "nothing"
    assert visible(tmp_path / "taken") == {"rows/2.0"}
    assert not list((tmp_path / "taken").glob(".treering/*/record.json"))
