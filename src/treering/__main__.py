"""``python -m treering``, and the program ``treering``: the command line."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line and leave the program; Ctrl-C while it is still being imported is no traceback either."""
    try:
        from treering._cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("error: stopped\n")
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
