"""What a benchmark compares of the files that another program wrote."""

from __future__ import annotations

from pathlib import Path

from benchmarks.checkpoint_scene import CheckpointFiles


def test_orbax_may_write_another_number_of_bytes(tmp_path: Path) -> None:
    files = object.__new__(CheckpointFiles)
    files.orbax, files._orbax_is_right = tmp_path / "before", True
    for folder, nbytes in ((files.orbax, 10_000), (tmp_path / "now", 100)):
        (folder / "d").mkdir(parents=True)
        (folder / "d" / "0").write_bytes(bytes(nbytes))
        (folder / "_METADATA").write_text('{"tree_metadata": {}}')
    assert files.right_orbax(tmp_path / "now") is None
    (tmp_path / "now" / "_METADATA").write_text('{"tree_metadata": {"a": 1}}')
    assert files.right_orbax(tmp_path / "now") == "what Orbax says of the tree is not what it said before"
