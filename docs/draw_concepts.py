"""Draw the figures of docs/concepts as SVG: ``python docs/draw_concepts.py`` writes ``docs/figures/*.svg``.

Text and lines have the colour of the page (``currentColor``), and fills are of medium brightness, so that one file fits
light and dark pages. The figures are narrow, because they also have to be read on a phone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from math import atan2, cos, pi, sin
from pathlib import Path

FOLDER = Path(__file__).parent / "figures"
WIDTH = 460
LINE = 18
COLOURS = {"old": "#8d99ae", "new": "#3b8fd9", "good": "#2a9d6f", "warn": "#d98a1f", "bad": "#d9534f"}


@dataclass
class Drawing:
    """One figure: what it shows, its height, and the elements drawn so far."""

    title: str
    told: str
    height: int
    parts: list[str] = field(default_factory=list)

    def box(self, place: tuple[float, float, float, float], colour: str, text: str = "", *, size: int = 14) -> None:
        """Draw a rectangle (x, y, width and height) with lines of text in its middle."""
        x, y, width, height = place
        tint = COLOURS[colour]
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{tint}" fill-opacity="0.22"'
            f' stroke="{tint}" stroke-width="1.5"/>'
        )
        lines = text.split("\n") if text else []
        top = y + height / 2 - LINE * (len(lines) - 1) / 2 + size * 0.35
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + LINE * number, line, anchor="middle", size=size)

    def text(
        self, x: float, y: float, text: str, *, anchor: str = "start", size: int = 14, weight: str = "normal"
    ) -> None:
        """Write one line."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}">'
            f"{escape(text)}</text>"
        )

    def lines(self, x: float, y: float, text: str, *, size: int = 14, weight: str = "normal") -> None:
        """Write several lines below each other."""
        for number, line in enumerate(text.split("\n")):
            self.text(x, y + LINE * number, line, size=size, weight=weight)

    def line(self, points: Sequence[tuple[float, float]], *, dashed: bool = False) -> None:
        """Draw a line through points."""
        through = " ".join(f"{x:g},{y:g}" for x, y in points)
        dashes = ' stroke-dasharray="4 4"' if dashed else ""
        self.parts.append(
            f'<polyline points="{through}" fill="none" stroke="currentColor" stroke-width="1.3"{dashes}/>'
        )

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """Draw a line through points, with a head at the last."""
        self.line(points, dashed=dashed)
        (from_x, from_y), (x, y) = points[-2:]
        angle = atan2(y - from_y, x - from_x)
        sides = [(x - 9 * cos(angle + turn), y - 9 * sin(angle + turn)) for turn in (pi / 8, -pi / 8)]
        head = " ".join(f"{a:.1f},{b:.1f}" for a, b in [(x, y), *sides])
        self.parts.append(f'<polygon points="{head}" fill="currentColor"/>')

    def svg(self) -> str:
        """Return the file."""
        return "\n".join(
            [
                (
                    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img"'
                    f' style="display:block;width:100%;max-width:{WIDTH * 1.3:g}px;height:auto;margin:1em auto"'
                    ' font-family="system-ui, sans-serif" fill="currentColor">'
                ),
                f"<title>{escape(self.title)}</title>",
                f"<desc>{escape(self.told)}</desc>",
                *self.parts,
                "</svg>",
                "",
            ]
        )


def draw_commit() -> Drawing:
    """What stands in the folder at each moment of an overwrite, and what a reader finds."""
    drawn = Drawing(
        "A commit is one rename",
        "Five moments of a save over an old checkpoint. Until the new index takes the place of the old one, a "
        "reader finds the old checkpoint, whole; from that moment on the new one, whole. Files of the old one are "
        "removed after that.",
        486,
    )
    drawn.text(10, 20, "the folder", weight="bold")
    drawn.text(WIDTH - 10, 20, "a reader finds", anchor="end", weight="bold")
    renamed = 3
    moments: list[tuple[str, list[tuple[str, str]], str, str]] = [
        ("before the save", [("index", "old"), ("data A", "old")], "old", "the old one"),
        (
            "data are written, under new names",
            [("index", "old"), ("data A", "old"), ("data B", "new")],
            "old",
            "the old one",
        ),
        (
            "everything is flushed to the disk",
            [("index", "old"), ("data A", "old"), ("data B", "good")],
            "old",
            "the old one",
        ),
        (
            "the commit: the index is renamed",
            [("index", "good"), ("data A", "old"), ("data B", "good")],
            "good",
            "the new one",
        ),
        ("old data are removed; save returns", [("index", "good"), ("data B", "good")], "good", "the new one"),
    ]
    for number, (told, files, colour, found) in enumerate(moments):
        y = 40 + 90 * number
        drawn.text(10, y + 14, f"{number + 1}. {told}", size=14, weight="bold" if number == renamed else "normal")
        for place, (name, tint) in enumerate(files):
            drawn.box((10 + 90 * place, y + 24, 82, 32), tint, name)
        drawn.box((WIDTH - 120, y + 24, 110, 32), colour, found)
        if number:
            drawn.line([(10, y - 10), (WIDTH - 10, y - 10)], dashed=number != renamed)
    return drawn


def draw_checks() -> Drawing:
    """Which checksum covers which bytes."""
    drawn = Drawing(
        "Every byte that a reader uses is covered by a checksum",
        "The first line of treering.json has a digest of the rest of it. The rest has a digest of the header of "
        "each data file, and a checksum of each block of array bytes. A load compares the block that it reads "
        "with its checksum before it returns an array.",
        430,
    )
    drawn.text(10, 20, "treering.json", weight="bold")
    drawn.box((10, 32, 440, 34), "new", "first line: a 128-bit digest of the rest")
    drawn.box((10, 76, 440, 108), "old")
    drawn.text(24, 98, "structure, dtypes, shapes, metadata")
    drawn.box((24, 110, 124, 60), "good", "a digest of\nthe header")
    for number in range(3):
        drawn.box((160 + 94 * number, 110, 84, 60), "good", f"checksum\n{number + 1}")
    drawn.text(10, 340, "data-….safetensors", weight="bold")
    drawn.box((24, 264, 124, 50), "old", "header")
    for number in range(3):
        drawn.box((160 + 94 * number, 264, 84, 50), "bad" if number == 1 else "old", f"block {number + 1}")
    for x in (86, 202, 296, 390):
        drawn.arrow((x, 170), (x, 262))
    drawn.arrow((4, 50), (4, 130), (10, 130))
    drawn.line([(4, 50), (10, 50)])
    drawn.arrow((202, 314), (202, 364))
    drawn.arrow((296, 314), (296, 364))
    drawn.box((130, 366, 118, 50), "good", "equal: its items\nare returned", size=13)
    drawn.box((256, 366, 194, 50), "bad", "a bit flipped: CorruptError\nnames leaf, file and bytes", size=13)
    return drawn


def draw_async() -> Drawing:
    """What happens on which thread, and from when on a step is durable."""
    drawn = Drawing(
        "A save in the background",
        "Time goes from left to right. run.save takes a snapshot on the thread that trains, which goes on at "
        "once. The thread that writes then writes the data, flushes them and commits. A kill before the commit "
        "leaves the step before, a kill after it leaves this one.",
        330,
    )
    drawn.text(10, 20, "your thread", weight="bold")
    for x, width, colour, told in [
        (10, 62, "old", "train"),
        (76, 82, "new", "snapshot"),
        (162, 62, "old", "train"),
        (228, 62, "old", "train"),
        (294, 62, "old", "train"),
        (360, 90, "old", "train …"),
    ]:
        drawn.box((x, 30, width, 36), colour, told)
    drawn.text(162, 84, "run.save(100) returns here", size=13)
    drawn.text(162, 122, "the thread that writes", weight="bold")
    drawn.box((162, 132, 92, 36), "new", "write, check")
    drawn.box((258, 132, 52, 36), "new", "flush")
    drawn.box((314, 132, 68, 36), "good", "commit")
    drawn.arrow((150, 66), (150, 150), (161, 150))
    drawn.line([(382, 100), (382, 262)], dashed=True)
    drawn.text(376, 186, "durable from here on", anchor="end", size=13)
    drawn.text(10, 216, "what a program finds that resumes after a kill", weight="bold")
    drawn.box((10, 226, 370, 36), "old", "the step before, whole")
    drawn.box((384, 226, 66, 36), "good", "step 100")
    drawn.lines(
        10,
        288,
        "A program that ends by itself waits for the commit. A save that\n"
        "failed is raised by the next call, or ends the program with 1.",
        size=14,
    )
    return drawn


def draw_resharding() -> Drawing:
    """Which saved boxes and blocks a process reads for the box that it wants."""
    drawn = Drawing(
        "How resharding reads",
        "An array was saved by a mesh of 4 by 2: eight boxes lie in the file one after the other. A process of "
        "another mesh wants the first quarter of the columns. It crosses four of the boxes, so the process reads "
        "the blocks of those that it needs, and no others.",
        390,
    )
    drawn.text(10, 20, "saved over 4 x 2 devices", weight="bold")
    drawn.text(250, 20, "wanted over 1 x 4 devices", weight="bold")
    for row in range(4):
        for column in range(2):
            wanted = column == 0
            drawn.box((10 + 100 * column, 34 + 36 * row, 96, 32), "new" if wanted else "old")
            drawn.text(86 + 100 * column, 55 + 36 * row, str(2 * row + column + 1))
    for column in range(4):
        drawn.box((250 + 50 * column, 34, 46, 140), "new" if column == 0 else "old", "this\none" if column == 0 else "")
    drawn.parts.append(
        '<rect x="10" y="32" width="46" height="144" fill="none" stroke="currentColor" stroke-width="2"'
        ' stroke-dasharray="5 3"/>'
    )
    drawn.lines(10, 200, "The wanted box (dashed) crosses the saved boxes 1, 3, 5 and 7.", size=14)
    drawn.text(10, 236, "the data file", weight="bold")
    for number in range(8):
        drawn.box((10 + 55 * number, 246, 51, 34), "new" if number % 2 == 0 else "old", str(number + 1))
    for number in range(0, 8, 2):
        drawn.arrow((35 + 55 * number, 280), (35 + 55 * number, 306))
    drawn.box((10, 308, 440, 34), "good", "read and checked: the blocks of 1, 3, 5 and 7 that it needs")
    drawn.arrow((230, 342), (230, 358))
    drawn.text(230, 378, "the wanted box, straight in its own memory", anchor="middle")
    return drawn


def draw_bucket() -> Drawing:
    """The requests of two saves to one name, of which one wins."""
    drawn = Drawing(
        "How a bucket commits",
        "Two programs save to one name. Both read the version of the key, v1, and put their data under names of "
        "their own. Program A puts its index on condition that the version is still v1, and the bucket accepts it "
        "as v2. The same request of program B is refused, and B raises an error.",
        436,
    )
    left, middle, right = 60, 230, 400
    for x, name, colour in [(left, "program A", "good"), (middle, "bucket", "new"), (right, "program B", "warn")]:
        drawn.box((x - 50, 8, 100, 32), colour, name)
        drawn.line([(x, 40), (x, 394 if x == middle else 350)], dashed=True)
    steps = [
        (left, middle, "GET the key: v1"),
        (right, middle, "GET the key: v1"),
        (left, middle, "PUT data of A"),
        (right, middle, "PUT data of B"),
        (left, middle, "PUT index if v1"),
        (middle, left, "200: it is v2"),
        (right, middle, "PUT index if v1"),
        (middle, right, "412: refused"),
    ]
    for number, (start, end, told) in enumerate(steps):
        y = 74 + 36 * number
        drawn.arrow((start, y), (end, y))
        drawn.text(
            (start + end) / 2, y - 6, told, anchor="middle", size=13, weight="bold" if "v2" in told else "normal"
        )
    drawn.box((8, 350, 150, 44), "good", "save returns:\nit is durable", size=13)
    drawn.box((302, 350, 150, 44), "bad", "BusyError, and its\ndata are removed", size=13)
    drawn.lines(10, 424, "No answer? A reads the key: the attempt in it says whose it is.", size=14)
    return drawn


FIGURES = {
    "commit": draw_commit,
    "checks": draw_checks,
    "async": draw_async,
    "resharding": draw_resharding,
    "bucket-commit": draw_bucket,
}


def main() -> None:
    """Write every figure."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
        sys.stdout.write(f"{name}.svg\n")


if __name__ == "__main__":
    main()
