"""Where a listing comes from, in a few notes: the form, who wrote it, its files, what the user wrote beside it."""

from __future__ import annotations

from treering._format.records import Listing, Named, Share
from treering._values.human import bytes_text, counted
from treering._values.processes import named
from treering._view.listing_json import json_text

_MOST_FILES = 4
_MOST_BRANCHES = 8
_MOST_SHARES = 4
_NAMES = {"checkpoint": "treering checkpoint", "leaves": "leaves directory"}


def notes_of(listing: Listing) -> list[tuple[str, str]]:
    """Return notes, each with a label; none for a msgpack file, which says nothing about itself.

    Example:
        >>> notes_of(Listing(form="safetensors", file_bytes=9, root={}, metadata={"step": 7}))
        [('form', 'safetensors, without checksums'), ('metadata', '{"step": 7}')]
    """
    if listing.form.startswith("msgpack"):
        return []
    notes = [("form", form_text(listing))]
    if _is_mixed(listing):
        shown = ", ".join(repr(prefix) if prefix else "no prefix" for prefix in listing.unverified[:_MOST_BRANCHES])
        left = len(listing.unverified) - _MOST_BRANCHES
        more = f" and {left:,} more" if left > 0 else ""
        notes.append(("unverified", f"{shown}{more}: written by another program, without checksums"))
    notes += [("note", text) for text in listing.notes]
    if listing.written:
        notes.append(("written", _written(listing)))
    if listing.shares:
        notes.append(("split", _shares(listing)))
    if listing.meshes:
        notes.append(("meshes" if len(listing.meshes) > 1 else "mesh", "; ".join(listing.meshes)))
    if isinstance(listing.root, Named):
        # The tree has no line for its root.
        notes.append(("root", listing.root.class_name))
    if listing.files:
        notes.append(("files", _files(listing)))
    if listing.metadata:
        notes.append(("metadata", json_text(listing.metadata)))
    return notes


def form_text(listing: Listing) -> str:
    """Name the form of a listing, and whether its arrays can be checked.

    Example:
        >>> form_text(Listing(form="checkpoint", file_bytes=9, root={}, verified=True))
        'treering checkpoint, with checksums'
    """
    if listing.form.startswith("msgpack"):
        return listing.form
    form = _NAMES.get(listing.form, listing.form)
    if listing.verified and listing.form != "checkpoint":
        form += " by treering"
    if _is_mixed(listing):
        return f"{form} by treering and others, with checksums of some leaves"
    return f"{form}, {'with' if listing.verified else 'without'} checksums"


def _is_mixed(listing: Listing) -> bool:
    return 0 < len(listing.unverified) < len(listing.prefixes)


def _written(listing: Listing) -> str:
    # The number of processes has words of its own.
    said = ((name, value) for name, value in listing.written.items() if name != "processes")
    shown = [f"{name} {value}" for name, value in said if isinstance(value, str | int | float)]
    if listing.processes > 1:
        shown.append(f"{counted(listing.processes, 'processes')}")
    return ", ".join(shown)


def _shares(listing: Listing) -> str:
    """Say what each process wrote; of many, the one with the fewest bytes and the one with the most."""
    shares = listing.shares
    if listing.processes <= _MOST_SHARES:
        of = {share.process: share for share in shares}
        return "; ".join(f"process {each}: {_share(of.get(each))}" for each in range(listing.processes))
    least, most = min(shares, key=lambda share: share.nbytes), max(shares, key=lambda share: share.nbytes)
    files = (
        f"{counted(sum(share.files for share in shares), 'files', ',')} by {named(share.process for share in shares)}"
    )
    sizes = [f"{bytes_text(share.nbytes)} (process {share.process})" for share in (least, most)]
    return f"{files}, from {sizes[0]} to {sizes[1]}"


def _share(share: Share | None) -> str:
    if share is None:
        return "no file"
    return f"{bytes_text(share.nbytes)} in {share.files:,} {'file' if share.files == 1 else 'files'}"


def _files(listing: Listing) -> str:
    shown = [f"{file.name} ({bytes_text(file.nbytes)})" for file in listing.files[:_MOST_FILES]]
    left = len(listing.files) - len(shown)
    return ", ".join(shown) + (f" and {left:,} more" if left > 0 else "")
