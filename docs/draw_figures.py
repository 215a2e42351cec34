"""Write the figures of README and the pages, and draw their charts, from the runs in ``benchmarks/results``.

    python docs/draw_figures.py            write the figures that the pages mark, and docs/figures
    python docs/draw_figures.py --check    change nothing; say what is not as the runs have it, with status 1

``benchmarks/figures.py`` says how a page marks a figure. A mark that names a table, such as ``table of
checkpoints``, gets a whole table. After a new run, write its JSON over the one in ``benchmarks/results`` and run this.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.figures import case, duration, figure, kept, machine, median_time, size, times  # noqa: E402 - it lies beside docs

MARK = re.compile(r"(<!-- figure: (?P<place>[^>]*?) -->)(?P<text>.*?)(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """Every page that may mark figures."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.md"), *ROOT.glob("docs/**/*.md")]
    return sorted(page for page in found if "_build" not in page.parts)


def written(text: str) -> str:
    """Return the text of a page with every marked figure as the runs have it."""
    return MARK.sub(lambda mark: f"{mark[1]}{_text(mark['place'])}{mark[4]}", text)


def _text(place: str) -> str:
    """What belongs to a mark: a table by its name, or one figure."""
    table = TABLES.get(place)
    return figure(place) if table is None else "\n\n" + "\n".join(table()) + "\n\n"


# -------------------------------------------------------------------------------------------------------------- tables


_ALIKE = (0.95, 1.05)
"""Ratios between these are no difference: rounds of one case differ by more."""


def _of(place: str) -> Callable[[str], str]:
    """What gives the figures of one group: ``_of("checkpoint; A; save")("Orbax; memory")``."""
    return lambda rest: figure(f"{place}; {rest}")


def _beside(place: str, *names: str) -> str:
    """Peers beside treering, each with what follows it in brackets, and in words where one is the faster one."""
    said = []
    for each in names:
        name = each.partition(" (")[0]
        benchmark, workload, group = place.split("; ")
        value = times(benchmark, workload, group, name)
        text = f"{each} takes {figure(f'{place}; {name}; times')} as long"
        said.append(text if value >= _ALIKE[0] else f"**{text}: it is faster**")
        if _ALIKE[0] <= value < _ALIKE[1]:
            said[-1] += ", which is no difference"
    return "; ".join(said)


def _memory(place: str, name: str, kind: str = "memory") -> str:
    """What a case takes of memory at its peak, beside its input; nothing where that was not measured."""
    benchmark, workload, group = place.split("; ")
    if case(benchmark, workload, group, name)["peak"] is None:
        return ""
    return f", {_of(place)(f'{name}; {kind}')}{' of memory' if kind == 'memory' else ' the bytes in memory'}"


def _smaller(benchmark: str) -> str:
    """Say that a run was a try with smaller trees."""
    return f"A try with trees of {size(benchmark):g} times the bytes that are said here, not the final figures."


def _head(benchmark: str) -> Iterator[str]:
    """The head of a table, below a warning where the trees were not as large as the pages say."""
    if size(benchmark) != 1:
        yield f"**{_smaller(benchmark)}**"
        yield ""
    yield "| | treering | beside it |"
    yield "|---|---|---|"


def checkpoints() -> Iterator[str]:
    """How fast checkpoints are saved and loaded."""
    save, load, mapped = "checkpoint; A; save", "checkpoint; A; load", "checkpoint; A; load mapped"
    many, back = "checkpoint; B; save", "checkpoint; B; load"
    yield from _head("checkpoint")
    own = f"{_of(save)('treering; time')}, {_of(save)('treering; count')} files{_memory(save, 'treering')}"
    orbax = f"Orbax has {_of(save)('Orbax; count')} files{_memory(save, 'Orbax')}"
    peers = _beside(save, "Orbax (not durable, no checksums)", "safetensors + fsync (no checksums)")
    yield f"| `save` A, durable, checked | {own} | {peers}; {orbax} |"
    yield f"| `save` B | {_of(many)('treering; time')} | {_beside(many, 'Orbax', 'safetensors + fsync')} |"
    own = f"{_of(load)('treering; time')}{_memory(load, 'treering', 'memory over bytes')}"
    peers = _beside(load, "Orbax (unchecked)", "safetensors (unchecked)")
    yield f"| `load` A, every byte checked | {own} | {peers} |"
    yield f"| `load` B | {_of(back)('treering; time')} | {_beside(back, 'Orbax', 'safetensors')} |"
    yield f"| `load(mapped=True)` A, checked | {_of(mapped)('treering; time')} | {_beside(mapped, 'Orbax')} |"
    cost = [_of("checkpoint; A; checksums save")("treering, no checksums; share"),
            _of("checkpoint; A; checksums load")("treering, unchecked; share")]  # fmt: skip
    yield f"| what the checksums cost | save {cost[0]}, load {cost[1]} | the same without |"


def serialization() -> Iterator[str]:
    """How fast flax's functions are here and there."""
    yield from _head("msgpack")
    out, into = "msgpack; A numpy; to_bytes", "msgpack; A numpy; from_bytes"
    own, flax = (f"{_memory(out, name, 'memory over bytes')}" for name in ("treering", "flax"))
    own = f"{_of(out)('treering; time')}{own}"
    peers = f"{_beside(out, 'flax', 'safetensors')}{flax and '; flax' + flax}"
    yield f"| `to_bytes` A | {own} | {peers} |"
    yield f"| `from_bytes` A | {_of(into)('treering; time')} | {_beside(into, 'flax')} |"


def background() -> Iterator[str]:
    """What a save in the background costs the loop."""
    yield from _head("run")
    for workload, words in (("A", "A"), ("B1", "1,000 leaves of 1 KiB")):
        place = f"run; {workload}; blocked"
        own = _of(place)("treering; time")
        yield f"| `save_async` of {words}: until the call returns | {own} | {_beside(place, 'Orbax')} |"
    own, orbax = (figure(f"run; A; stolen; {name}; time") for name in ("treering", "Orbax"))
    yield f"| `save_async` of A: time that training steps lose | {own} | Orbax {orbax} |"


def small_leaves() -> Iterator[str]:
    """What trees of thousands of leaves of 1 KiB cost."""
    yield from _head("many")
    for workload, words in (("1k", "1,000"), ("10k", "10,000")):
        for group, call, peer in (("save", "save", "safetensors + fsync"), ("load", "load", "safetensors")):
            place = f"many; {workload}; {group}"
            yield f"| `{call}` of {words} leaves | {_of(place)('treering; time')} | {_beside(place, peer)} |"
    place = "many; 10k; open, one leaf"
    yield f"| `open` of 10,000, and one leaf | {_of(place)('treering; time')} | {_beside(place, 'safetensors')} |"


def where_measured() -> Iterator[str]:
    """One row for each run: when, where, and by which command."""
    yield "| command | date | machine | versions |"
    yield "|---|---|---|---|"
    for name in kept():
        found = dict(machine(name))
        place = [
            f"{found.pop('cores')} cores ({found.pop('processor')})", found.pop("memory"), found.pop("file system"),
            f"load {found.pop('load')} at the beginning",
        ]  # fmt: skip
        date, command, system = (found.pop(each) for each in ("date", "command", "system"))
        versions = ", ".join(f"{package} {version}" for package, version in found.items())
        yield f"| `{command}` | {date} | {', '.join([system, *place])} | {versions} |"


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "table of checkpoints": checkpoints,
    "table of serialization": serialization,
    "table of the background": background,
    "table of small leaves": small_leaves,
    "table of runs": where_measured,
}
"""What a mark can name beside the place of one figure."""

# --------------------------------------------------------------------------------------------------------------- chart

_PANELS = (
    ("Save 1 GiB in 147 leaves", "checkpoint; A; save", ("treering", "safetensors + fsync", "Orbax")),
    ("Load it", "checkpoint; A; load", ("treering", "safetensors", "Orbax")),
    ("Save 10,000 leaves of 1 KiB", "checkpoint; B; save", ("treering", "safetensors + fsync", "Orbax")),
    ("Load them", "checkpoint; B; load", ("treering", "safetensors", "Orbax")),
)
_STYLE = """
  .paper { fill: #ffffff; stroke: #d1d9e0 } .head { fill: #1f2328; font-weight: 600 } .word { fill: #1f2328 }
  .note { fill: #59636e; font-size: 13px } .ours { fill: #1a7f37 } .other { fill: #818b98 }
  text { font-family: system-ui, sans-serif; font-size: 15px } .us { font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #0d1117; stroke: #3d444d } .head, .word { fill: #f0f6fc }
    .note { fill: #9198a1 } .ours { fill: #3fb950 } .other { fill: #656c76 }
  }
"""
_WIDTH, _BARS_AT, _BARS, _ROW = 560, 190, 280, 26


def chart() -> str:
    """The chart of the landing page: what save and load take beside peers, on a scale for each pair of bars."""
    said: list[str] = []
    body: list[str] = []
    y = 56
    for title, place, names in _PANELS:
        benchmark, workload, group = place.split("; ")
        taken = {name: median_time(benchmark, workload, group, name) for name in names}
        said.append(f"{title}: {', '.join(f'{name} {duration(value)}' for name, value in taken.items())}.")
        body.append(f'<text class="head" x="20" y="{y}">{escape(title)}</text>')
        body += _bars(taken, y + 12)
        y += 30 + _ROW * len(taken) + 16
    made = machine("checkpoint")
    notes = (
        "treering checks every byte, and a save has reached the disk when it returns.",
        "Orbax: not flushed, unchecked. safetensors: unchecked; its save and an fsync.",
        f"{made['date']}, {made['cores']} cores, Orbax {made['orbax-checkpoint']}, safetensors {made['safetensors']}",
        *((_smaller("checkpoint"),) if size("checkpoint") != 1 else ()),
    )
    body += [f'<text class="note" x="20" y="{y + 18 * i}">{escape(note)}</text>' for i, note in enumerate(notes)]
    height = y + 18 * len(notes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
        ' role="img" aria-labelledby="title said">\n'
        '<title id="title">How long save and load take, beside Orbax and safetensors</title>\n'
        f'<desc id="said">{escape(" ".join(said))}</desc>\n<style>{_STYLE}</style>\n'
        f'<rect class="paper" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="8"/>\n'
        '<text class="note" x="20" y="28">Seconds; shorter is better. Each group has a scale of its own.</text>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _bars(taken: dict[str, float], y: int) -> Iterator[str]:
    """One bar for each case, with its name before it and its time after it."""
    longest = max(taken.values())
    for name, value in taken.items():
        width = max(2.0, value / longest * _BARS)
        us, bar = (" us", "ours") if name == "treering" else ("", "other")
        yield f'<text class="word{us}" x="20" y="{y + 16}">{escape(name)}</text>'
        yield f'<rect class="{bar}" x="{_BARS_AT}" y="{y + 3}" width="{width:.1f}" height="18" rx="2"/>'
        yield f'<text class="word{us}" x="{_BARS_AT + width + 8:.1f}" y="{y + 16}">{duration(value)}</text>'
        y += _ROW


DRAWN: dict[str, Callable[[], str]] = {"landing.svg": chart}
"""The charts in ``docs/figures``."""

# ----------------------------------------------------------------------------------------------------------- the script


def wanted() -> Iterator[tuple[Path, str]]:
    """Every file that has figures, and what it should hold."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if MARK.search(text):
            yield page, written(text)
    for name, draw in DRAWN.items():
        yield ROOT / "docs" / "figures" / name, draw()


def differences(page: str, text: str) -> list[str]:
    """Each marked figure of a page that is not as the runs have it."""
    return [
        f"{page}: {mark['place']}: the page says {mark['text'].strip()!r}, the run {_text(mark['place']).strip()!r}"
        for mark in MARK.finditer(text)
        if mark["text"] != _text(mark["place"])
    ]


def main() -> int:
    """Write what differs, or with ``--check`` say it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 if a figure differs")
    given = parser.parse_args()
    changed = []
    for path, text in wanted():
        found = path.read_text(encoding="utf-8") if path.exists() else ""
        if found == text:
            continue
        shown = str(path.relative_to(ROOT))
        changed += differences(shown, found) or [f"{shown}: it is not what is drawn from the runs"]
        if not given.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    sys.stdout.writelines(f"{line}\n" for line in changed)
    return 1 if changed and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
