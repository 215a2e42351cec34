"""A document of `gather` -> one HTML page with its script, its style and its data, and nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import html
import pkgutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from treering._values.human import bytes_text, pluralize
from treering._values.keys import key_name
from treering._view.plain import json_text
from treering._view.run_text import draw_curve

MARK: Final = "<!doctype html><!-- a report of treering -->"
"""What every page begins with, so that a newer one may replace it."""
_MOST_ROWS: Final = 500


def render(document: Mapping[str, Any], *, live: bool = False) -> bytes:
    """Write the page: its totals, tables and largest leaves as HTML, and all of the document for the script.

    Args:
        document: what `gather` returned.
        live: include the script that follows a run, which asks the address that the page came from.

    Example:
        >>> from treering import serialization
        >>> from treering._report.contents import gather
        >>> serialization.save_to_file({"<b>": 7}, "state.msgpack")
        >>> page = render(gather("state.msgpack"))
        >>> b"&lt;b&gt;" in page, b"<b>" in page, b"default-src 'none'" in page
        (True, False, True)
    """
    style, *scripts = (_read(name) for name in ("report.css", "report.js", *(["follow.js"] if live else [])))
    allowed = " ".join(map(_hash, scripts))
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; img-src data:; "
        f"connect-src {chr(39)}{'self' if live else 'none'}{chr(39)}; base-uri 'none'; form-action 'none'"
    )
    data = base64.b64encode(zlib.compress(json_text(document).encode(), 9)).decode()
    parts = [
        f'{MARK}<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">',
        f"<title>{_safe(document['path'])} · treering report</title><style>{style}</style></head>",
        f'<body><main id="report">{"".join(_sections(document))}</main>',
        f'<script id="data" type="application/octet-stream">{data}</script>',
        *(f"<script>{script}</script>" for script in scripts),
        "</body></html>\n",
    ]
    return "\n".join(parts).encode("utf-8", "backslashreplace")


def _read(name: str) -> str:
    data = pkgutil.get_data(__package__, name)
    if data is None:
        raise FileNotFoundError(name)
    return data.decode()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _safe(text: object) -> str:
    return html.escape(str(text))


# ----------------------------------------------------------------------------------------------- without the script


def _sections(document: Mapping[str, Any]) -> Iterator[str]:
    totals = document["totals"]
    step = f", step {document['step']}" if document.get("step") is not None else ""
    yield f"<header><p>treering report</p><h1>{_safe(document['path'])}{step}</h1>"
    yield f"<p>{_safe(document['form'])} · made {_safe(document['made'])} by {_safe(document['by'])}</p></header>"
    facts = {
        "bytes of leaves": totals["bytes"],
        "parameters": totals["elements"],
        "leaves": f"{totals['leaves']:,}",
        "bytes of files": bytes_text(totals["file_bytes"]),
    }
    yield f"<section><dl>{''.join(f'<div><dt>{k}</dt><dd>{_safe(v)}</dd></div>' for k, v in facts.items())}</dl>"
    yield "".join(f"<p><b>{_safe(label)}</b> {_safe(text)}</p>" for label, text in document["notes"]) + "</section>"
    for table in document["tables"]:
        yield _table(table["title"], table.get("note", ""), table["heads"], table["rows"][:_MOST_ROWS])
    dtypes = [[name, f"{each['leaves']:,}", each["elements"], each["bytes"]] for name, each in document["dtypes"]]
    yield _table("Data types", "", ["dtype", "leaves", "parameters", "bytes"], dtypes)
    yield _largest(document)


def _largest(document: Mapping[str, Any]) -> str:
    leaves, types = document["leaves"], document["types"]
    count = len(leaves["keys"])
    order = sorted(range(count), key=lambda place: -leaves["nbytes"][place])[:_MOST_ROWS]
    rows = []
    for place in order:
        dtype, detail, _, split = types[leaves["types"][place]]
        rows.append([key_name(leaves["keys"][place]), dtype, detail, bytes_text(leaves["nbytes"][place]), split])
    total = document["totals"]["leaves"]
    note = f"The {len(rows)} largest; the others need the script of this page." if total > len(rows) else ""
    return _table(f"{pluralize(total, 'leaves', ',')}", note, ["key", "dtype", "shape", "bytes", "sharding"], rows)


def _table(title: str, note: str, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{_safe(each)}</th>" for each in heads)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    shown = f'<div class="scroll">{table}</div>' if rows else ""
    return f"<section><h2>{_safe(title)}</h2><p>{_safe(note)}</p>{shown}</section>"


def _cell(cell: Any) -> str:
    return _safe(draw_curve(cell["bars"]) if isinstance(cell, dict) else cell)
