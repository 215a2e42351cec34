"""``python -m demo.bucket``, which ``dev.py demo-bucket`` runs. Only the processes that it starts import jax."""

from __future__ import annotations

import os

import click

from treering._cli.main import GOOD, NO, explain, main


@click.command(
    epilog="\b\nExamples:\n  python3 dev.py demo-bucket\n  python3 dev.py demo-bucket --seconds 10\n",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--seconds", type=click.FloatRange(0.1, 30), default=4.0, show_default=True, help="How long to train.")
def demo(seconds: float) -> int:
    """Train a small real model with its run in a bucket, kill it, move it, and lose an answer at a commit.

    SeaweedFS, a real server of objects, is started on this machine, with a proxy before it that shows each request and
    can spoil it. The model trains and saves to s3:// behind its loop, and is killed in the midst of a save. A fresh
    process resumes from the bucket on another mesh. Then the answer to the request that commits a save is lost: the
    save reads the bucket again, and finds out that it has happened. Under a minute, without network; nothing stays.
    """
    from rich.console import Console

    from demo.bucket_story import tell
    from torture.bucket_servers import open_seaweed
    from torture.fault_proxy import FaultProxy

    console = Console(highlight=False)
    with open_seaweed() as server, FaultProxy(server.port) as proxy:
        os.environ |= server.at(proxy.port).environment()
        proofs = tell(console, f"{server.url}/demo/run", proxy, seconds=seconds, ports=(server.port, proxy.port))
    failed = [proof for proof in proofs if not proof.held]
    for proof in failed:
        explain(f"not proved: {proof.claim} ({proof.detail})")
    return NO if failed else GOOD


if __name__ == "__main__":
    main(command=demo)
