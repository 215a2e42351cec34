"""Every address that a page has ever had, in ``docs/published.txt``: it is a page, or leads to one.

``python docs/building/published.py`` adds the pages that are new. A page that moves gets ``-> new address`` there.
"""

from __future__ import annotations

import html
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from building.pages import DOCS, every_page
from building.reference import entries

LIST = DOCS / "published.txt"
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>This page has moved</title>
<meta name="description" content="This page has moved to {to}.">
<link rel="canonical" href="{to}">
<meta http-equiv="refresh" content="1; url={to}">
<script>location.replace({script} + location.hash)</script>
</head>
<body><h1>This page has moved</h1><p>It is <a href="{to}">here</a> now.</p></body>
</html>
"""


def published() -> dict[str, str | None]:
    """Return every address, and where it leads to if its page has moved."""
    lines = [line for line in LIST.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    return {old: new or None for old, _, new in (line.partition(" -> ") for line in lines)}


def addresses() -> list[str]:
    """Return the addresses of the pages that there are, those of the reference included, which the build makes."""
    return [f"{name}.html" for name in sorted({*every_page(), *(f"reference/api/{path}" for path in entries())})]


def unpublished() -> list[str]:
    """Return the addresses of pages that the list lacks."""
    known = published()
    return [address for address in addresses() if address not in known]


def write_redirects(folder: Path) -> None:
    """Write a page at each old address into a folder of built pages."""
    for old, new in published().items():
        if new is not None:
            path = folder / old
            path.parent.mkdir(parents=True, exist_ok=True)
            to = "../" * old.count("/") + new
            path.write_text(_PAGE.format(to=html.escape(to), script=repr(to)), encoding="utf-8")


if __name__ == "__main__":
    with LIST.open("a", encoding="utf-8") as file:
        file.writelines(f"{address}\n" for address in unpublished())
