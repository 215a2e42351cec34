"""``python -m demo``, which ``dev.py demo`` runs. Only the processes that it starts import jax."""

from __future__ import annotations

import os
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import click

from demo import FILES
from treering._cli.main import GOOD, NO, NOT_DONE, explain, main
from treering.errors import StoreError


@click.command(
    epilog="\b\nExamples:\n  python3 dev.py demo\n  python3 dev.py demo --seconds 20 --keep demo-files\n",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--seconds", type=click.FloatRange(0.1, 30), default=8.0, show_default=True, help="How long to train.")
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Leave the files in DIR; without it they are removed at the end.",
)
@click.option("--open", "opens", is_flag=True, help="Open the report at the end in the browser.")
def demo(seconds: float, keep: Path | None, opens: bool) -> int:
    """Train a small real model, kill it, move it, break it, and prove that every bit comes back.

    A character-level transformer learns CPython's own help texts on eight host devices, and saves in the background as
    it goes. It is killed in the midst of a save. Fresh processes resume from the last save that was acknowledged, on a
    2x2 mesh and on one device: every leaf and the next loss have to be the same to the last bit. Then one bit of a file
    is flipped, and verify has to name the step and the leaf. At the end stands how long the loop stood still for each
    save, and a report of the run is written that you can open in a browser. Half a minute in all, without network.
    """
    in_the_way = next((keep / name for name in FILES if (keep / name).exists()), None) if keep else None
    if in_the_way:
        explain(f"{os.fspath(in_the_way)!r} is there already, and is not overwritten", "give --keep a new folder")
        return NOT_DONE
    with _folder(keep) as folder:
        from rich.console import Console

        from demo.story import tell

        proofs = tell(
            Console(highlight=False), seconds=seconds, folder=Path(folder), kept=keep is not None, opens=opens
        )
    failed = [proof for proof in proofs if not proof.held]
    for proof in failed:
        explain(f"not proved: {proof.claim} ({proof.detail})")
    return NO if failed else GOOD


def _folder(keep: Path | None) -> AbstractContextManager[str | Path]:
    """Give the folder for the demo's files, made if need be: the user's, or one that goes away again."""
    try:
        if keep is None:
            return tempfile.TemporaryDirectory(prefix="treering-demo-", ignore_cleanup_errors=True)
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError.of(error, keep or tempfile.gettempdir(), "make the folder") from error
    return nullcontext(keep.resolve())


if __name__ == "__main__":
    main(command=demo)
