"""Where a listing comes from, in a few notes: the form, who wrote it, its files, what the user wrote beside it."""

from __future__ import annotations

from treering._format.records import Listing, Named
from treering._values.human import bytes_text
from treering._view.listing_json import json_text

__all__ = ["form_text", "notes_of"]

_MOST_FILES = 4


def notes_of(listing: Listing) -> list[tuple[str, str]]:
    """Return notes, each with a label; none for a msgpack file, which says nothing about itself.

    Example:
        >>> notes_of(Listing(form="safetensors", file_bytes=9, root={}, metadata={"step": 7}))
        [('form', 'safetensors, without checksums'), ('metadata', '{"step": 7}')]
    """
    if listing.form.startswith("msgpack"):
        return []
    notes = [("form", form_text(listing))]
    if listing.written:
        notes.append(("written", _written(listing)))
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
    form = "treering checkpoint" if listing.form == "checkpoint" else listing.form
    if listing.verified and form != "treering checkpoint":
        form += " by treering"
    return f"{form}, {'with' if listing.verified else 'without'} checksums"


def _written(listing: Listing) -> str:
    shown = [f"{name} {value}" for name, value in listing.written.items() if isinstance(value, str | int | float)]
    if listing.processes > 1:
        shown.append(f"{listing.processes} processes")
    return ", ".join(shown)


def _files(listing: Listing) -> str:
    shown = [f"{file.name} ({bytes_text(file.nbytes)})" for file in listing.files[:_MOST_FILES]]
    left = len(listing.files) - len(shown)
    return ", ".join(shown) + (f" and {left:,} more" if left > 0 else "")
