"""``python -m treering``, and the program ``treering``: the command line."""

import contextlib
import sys

from treering import __version__

__all__ = ["main"]


def main() -> None:
    """Run the command line and leave the program; Ctrl-C while it is still being imported is no traceback either."""
    try:
        if sys.argv[1:] == ["--version"]:
            # All of the command line takes twice as long to import; an error is told by it.
            with contextlib.suppress(OSError, AttributeError):
                sys.stdout.write(f"treering {__version__}\n")
                sys.stdout.flush()
                sys.exit(0)
        from treering._cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("error: stopped\n")
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
