"""``treering cp``: a checkpoint, a run or a file, copied between disk and buckets."""

from __future__ import annotations

import click

from treering._cli.options import describe, verb
from treering._cli.terminal import GOOD, write_lines
from treering._printable import hide_secrets
from treering._view.progress import reporter, showing


@verb(
    "treering cp runs/a s3://bucket/runs/a",
    "treering cp s3://bucket/runs/a/step_00001000 ckpt",
    "treering cp https://host/model.safetensors model.safetensors",
)
@click.argument("source", metavar="SRC", type=click.Path(path_type=str))
@click.argument("target", metavar="DST", type=click.Path(path_type=str))
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint, a step or a file that is there.")
def cp(source: str, target: str, *, overwrite: bool) -> int:
    """Copy SRC to DST: a checkpoint, a run step by step, or a single file, between disk, buckets and web servers.

    DST is the path of the copy itself. Every block is compared with its checksum on the way. The copy of a checkpoint
    is a save of its own: nothing is at DST before it is whole. A copy of a run that was interrupted goes on where it
    was.
    """
    from treering._runs.copy_run import copy_path

    told = reporter(True, "copying")
    with showing(told):
        copy_path(source, target, overwrite=overwrite, progress=told)
    write_lines([hide_secrets(f"{target}: {describe(target)}, from {source}")])
    return GOOD
