"""``treering convert`` on the command line."""

from pathlib import Path

import numpy as np

import treering
from tests.command import here


def test_what_the_form_cannot_hold_is_listed_a_line_each(tmp_path: Path) -> None:
    treering.save(tmp_path / "ckpt", {"w": np.ones(3), "step": 1, "name": "a"})
    said = here("convert", str(tmp_path / "ckpt"), str(tmp_path / "w.safetensors"), code=2).stderr.splitlines()
    assert said[0] == "error: the form 'safetensors' cannot hold:"
    assert {"  leaf 'step': an int", "  leaf 'name': a str"} <= set(said)
    assert not (tmp_path / "w.safetensors").exists()
    here("convert", str(tmp_path / "ckpt"), str(tmp_path / "w.safetensors"), "--only", "w", code=0)
    assert treering.load(tmp_path / "w.safetensors")["w"].tolist() == [1, 1, 1]
