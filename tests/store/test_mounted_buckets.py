"""Buckets that are mounted as folders are read, and refused for saving with the URL to use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import treering
from tests import limits
from tests.caches import clear_caches
from treering.errors import UnsupportedError


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Let the file system of the test look as one that is mounted so, at the folder of the test."""
    table = tmp_path / "mountinfo"

    def mount(line: str) -> None:
        device = tmp_path.stat().st_dev
        numbers, point = f"{os.major(device)}:{os.minor(device)}", str(tmp_path).replace(" ", r"\040")
        table.write_text(
            f"22 1 0:21 / /proc rw - proc proc rw\n36 22 {numbers} {line.replace('POINT', point)} rw,x=1\n"
        )
        limits.lower(monkeypatch, table_of_mounts=str(table))
        clear_caches()

    yield mount
    clear_caches()


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("line", "url"),
    [
        ("/ POINT rw shared:1 - fuse.gcsfuse models", "gs://models/a/ckpt"),
        (r"/ POINT rw - fuse.gcsfuse my\040models", "gs://my models/a/ckpt"),
        ("/runs POINT rw - fuse.gcsfuse models", "gs://models/runs/a/ckpt"),
        ("/ POINT rw - fuse.s3fs s3fs", "s3://BUCKET/a/ckpt"),
        ("/ POINT rw - fuse.mountpoint-s3 mountpoint-s3", "s3://BUCKET/a/ckpt"),
        ("/ POINT rw - fuse mountpoint-s3", "s3://BUCKET/a/ckpt"),
        ("/ POINT rw - fuse.goofys models:runs", "s3://models/runs/a/ckpt"),
        ("/ POINT rw - fuse.rclone remote:models", "s3://BUCKET/a/ckpt"),
        ("/ POINT rw - fuse.blobfuse2 blobfuse2", "az://BUCKET/a/ckpt"),
    ],
)
def test_saving_to_a_mounted_bucket_is_refused(
    line: str, url: str, mounted: Callable[[str], None], tmp_path: Path
) -> None:
    treering.save(tmp_path / "before", {"w": np.arange(3)})
    mounted(line)
    target = tmp_path / "a" / "ckpt"
    for save in (
        lambda: treering.save(target, {"w": np.zeros(2)}),
        lambda: treering.save_async(target, {"w": np.zeros(2)}).result(),
    ):
        with pytest.raises(UnsupportedError, match=r"in a bucket that .* shows as a folder") as caught:
            save()
        assert repr(url) in str(caught.value)
    assert not target.parent.exists()
    assert treering.load(tmp_path / "before")["w"].tolist() == [0, 1, 2]


def test_single_files_and_runs_are_refused_too(mounted: Callable[[str], None], tmp_path: Path) -> None:
    mounted("/ POINT rw - fuse.gcsfuse models")
    for name in ("a.msgpack", "a.safetensors"):
        with pytest.raises(UnsupportedError, match=r"save to .gs://models."):
            treering.save(str(tmp_path / name), {"w": np.zeros(2, np.float32)})
    with pytest.raises(UnsupportedError, match="gs://models/run"), treering.Run(tmp_path / "run") as run:
        run.save(1, {"w": np.zeros(2)})


@pytest.mark.parametrize("line", ["/ POINT rw - ext4 /dev/sda1", "/ POINT rw - fuse.sshfs host:/models"])
def test_other_file_systems_are_saved_to(line: str, mounted: Callable[[str], None], tmp_path: Path) -> None:
    mounted(line)
    treering.save(tmp_path / "ckpt", {"w": np.arange(3)})
    assert treering.load(tmp_path / "ckpt")["w"].tolist() == [0, 1, 2]


def test_the_table_of_mounts_is_read_once_for_a_device(mounted: Callable[[str], None], tmp_path: Path) -> None:
    mounted("/ POINT rw - ext4 /dev/sda1")
    treering.save(tmp_path / "one", {"w": np.arange(3)})
    table = tmp_path / "mountinfo"
    table.write_text(table.read_text().replace("ext4 /dev/sda1", "fuse.gcsfuse models"))
    treering.save(tmp_path / "two", {"w": np.arange(3)})
    clear_caches()
    with pytest.raises(UnsupportedError, match="gs://models"):
        treering.save(tmp_path / "three", {"w": np.arange(3)})
