"""``python -m treering``: the command line."""

from treering._cli.main import main

main()
