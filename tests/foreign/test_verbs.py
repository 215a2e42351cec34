"""Every verb that reads works on every form of other programs, and ``inspect`` says which one it saw."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import treering
from tests.command import inside
from torture.foreign_images import foreign_seeds

SEEDS = {name: image for name, image in foreign_seeds().items() if not image.databases}
SAID = {"deflated npz": "npz", "hf": "Hugging Face", "zarr 3": "Orbax", "eformer_structured": "eformer"}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", SEEDS)
def test_verbs_show_it(name: str, tmp_path: Path) -> None:
    path = str(SEEDS[name].write(tmp_path / "image"))
    program = re.split("[,/]", name)[0]
    assert SAID.get(program, program).lower() in inside("inspect", path, code=0)[0].lower()
    with treering.open(path) as opened:
        key, leaf = next((key, leaf) for key in opened if hasattr(leaf := opened[key], "shape"))
        array = np.asarray(leaf[...])
    listed = json.loads(inside("ls", path, "--json", code=0)[0])
    assert "steps" in listed or key in {leaf["key"] for leaf in listed["leaves"]}
    assert json.loads(inside("du", path, "--json", code=0)[0])["total"]["nbytes"] >= array.nbytes
    assert json.loads(inside("verify", path, "--json", code=0)[0])["findings"] == []
    assert json.loads(inside("diff", path, path, "--json", code=0)[0])["differences"] == []
    first = "" if array.ndim == 0 else "[" + ", ".join("0" * array.ndim) + "]"
    assert inside("cat", path, key + first, code=0)[0].strip()
