"""``treering convert`` on the command line."""

from pathlib import Path

import numpy as np
import pytest

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


def test_a_rename_that_no_leaf_has_the_key_for_is_refused(tmp_path: Path) -> None:
    source, new = str(tmp_path / "ckpt"), str(tmp_path / "new")
    treering.save(source, {"params": {"w": np.ones(3), "b": 1}})
    for wrong, hint in (("param/w=v", "did you mean 'params/w'?"), ("zzz=v", f"treering ls {source!r} lists all keys")):
        said = here("convert", source, new, "--rename", "params/b=c", "--rename", wrong, code=2).stderr.splitlines()
        assert said == [f"error: --rename: no leaf matches {wrong[:-2]!r}", f"hint: {hint}"]
        assert not (tmp_path / "new").exists()
    said = here("convert", source, new, "--rename", "params=model", code=2).stderr.splitlines()
    assert said[1] == "hint: it is a branch; --rename 'params/{k**}=model/{k**}' renames all that lies below it"
    here("convert", source, str(tmp_path / "model"), "--rename", "params/{k**}=model/{k**}", code=0)
    assert set(treering.load(tmp_path / "model")["model"]) == {"w", "b"}
    here("convert", source, new, "--at", "params", "--rename", "w=v", code=2)
    here("convert", source, new, "--at", "params", "--rename", "params/w=params/v", code=0)
    assert set(treering.load(new)) == {"v", "b"}
    with treering.Run(tmp_path / "run") as run:
        run.save(1, {"a": 1})
        run.save(2, {"b": 1})
    here("convert", str(tmp_path / "run"), str(tmp_path / "run2"), "--rename", "a=c", code=0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--max-file-size", "2GB"],
            ["--max-file-size needs a form that has it", "--to 'hf', a Hugging Face folder, has it"],
        ),
        (["--dtype", "nope"], ["--dtype 'nope' is not a dtype of floats", "for example bfloat16 or float32"]),
        (
            ["--only", "z"],
            ["nothing in the checkpoint matches 'z'", "--only takes the checkpoint's keys, from its root on"],
        ),
        (["--item", "a=b"], ["the form treering has no items", "--to 'orbax' has them"]),
    ],
)
def test_errors_speak_of_options(tmp_path: Path, options: list[str], said: list[str]) -> None:
    treering.save(tmp_path / "ckpt", {"w": np.ones(3)})
    told = here("convert", str(tmp_path / "ckpt"), str(tmp_path / "new"), *options, code=2).stderr
    assert told.splitlines() == [f"error: {said[0]}", f"hint: {said[1]}"]


def test_a_hint_names_the_verb_for_a_function(tmp_path: Path) -> None:
    with treering.Run(tmp_path / "run") as run:
        run.save(1, {"w": 1})
    treering.save(tmp_path / "ckpt", {"w": 1})
    told = here("cp", str(tmp_path / "run"), str(tmp_path / "ckpt"), code=2).stderr
    assert f"hint: treering inspect {str(tmp_path / 'ckpt')!r} shows it; use another folder for the run" in told


def test_the_hint_for_another_suffix_names_all_files_that_convert_writes(tmp_path: Path) -> None:
    treering.save(tmp_path / "ckpt", {"w": np.ones(3)})
    said = here("convert", str(tmp_path / "ckpt"), str(tmp_path / "w.bin"), code=2).stderr
    assert "a name without it becomes a folder; .safetensors, .msgpack and .npz become one file" in said
