"""From what the caller gives to a place: URLs of the disk, of memory, and what none of them can do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import treering
from tests.jobs import be_process
from tests.stores import located
from treering.errors import UnsupportedError

TREE = {"w": np.arange(4)}


@pytest.mark.parametrize("name", ["a", "a b", "100%", "gr\u00f6\u00dfe", "a#b?c"])
def test_a_file_url_is_a_path_on_disk(name: str, tmp_path: Path) -> None:
    url = (tmp_path / name).as_uri()
    assert located(url) == tmp_path / name
    treering.save(url, TREE)
    assert (tmp_path / name / "treering.json").is_file()
    assert treering.load(url)["w"].tolist() == [0, 1, 2, 3]
    treering.leaves.tree_serialize_leaves(f"{url}.leaves", TREE)
    assert treering.load(f"{url}.leaves")["w"].tolist() == [0, 1, 2, 3]


def test_forms_of_file_urls() -> None:
    assert located("file://localhost/a/b") == located("file:/a/b") == located("FILE:///a/b") == Path("/a/b")
    for url in ("file://host/a", "file://host"):
        with pytest.raises(UnsupportedError, match="file:///PATH"):
            located(url)


@pytest.mark.parametrize("door", [treering.save, treering.save_async])
def test_a_joint_save_into_memory_is_refused(door: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as job:
        be_process(job, 1, 2)
        with pytest.raises(UnsupportedError, match="another place in each process"):
            door("memory://joint/a", TREE)  # type: ignore[operator]
    with pytest.raises(treering.errors.NotFoundError):
        treering.load("memory://joint/a")
