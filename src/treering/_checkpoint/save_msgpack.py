"""A tree, or an opened one -> one msgpack file, as ``flax.serialization.to_bytes`` writes its state dict."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from treering._arrays.host import BoxedArray, encode_state, piece_buffers, to_host
from treering._arrays.outgoing import WHOLE, SavedPart
from treering._arrays.source import Source
from treering._arrays.source_arrays import SourceArray, describe_source
from treering._background.writer import UNWATCHED, Watch
from treering._checkpoint.forms import Loss, key_texts, lost_containers, lost_leaves, lost_members, lost_names
from treering._checkpoint.save_files import write_buffers
from treering._checkpoint.save_options import SaveOptions
from treering._codec.msgpack.write import Block, Encoder, Piece, pieces_size, vary
from treering._format.index import Container
from treering._format.safetensors import why_not_stored
from treering._format.selection import Selection
from treering._format.structure import key_text, walk
from treering._store.resolve import needs_nonce
from treering._tree.state_dict import to_state_dict
from treering._values.keys import quoted_key
from treering.errors import UnsupportedError

_REFUSED: Final = frozenset({"key", "opaque", "bytearray"})
_LEAST, _MOST = -(1 << 63), 1 << 64

CHUNK_BYTES: Final = 2**30
"""Larger arrays are written in chunks, as flax does."""


class MsgpackSave:
    """The state dict of a tree, to be written as flax does.

    Attributes:
        nbytes: how much memory its snapshot takes.
    """

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = pieces
        self.nbytes = pieces_size(pieces)

    @classmethod
    def of(cls, tree: Any, metadata: Mapping[str, Any], part: SavedPart = WHOLE) -> MsgpackSave:
        """Return what the file will be made of.

        Raises:
            UnsupportedError: a leaf that the form cannot hold, or metadata, or that it is a part, or a cast.
        """
        if part.only is not None:
            hint = "save to a folder or a .safetensors file, from which treering.convert makes one"
            raise UnsupportedError("a msgpack file cannot say that it holds a part of a tree, only=", hint=hint)
        if part.dtypes:
            hint = "treering.export(path, tree, dtype=...) casts on the way into such a file"
            raise UnsupportedError("a msgpack file is saved as the tree is, without dtype=", hint=hint)
        if metadata:
            hint = "save to a folder or a .safetensors file"
            raise UnsupportedError("a msgpack file cannot hold metadata", hint=hint)
        return cls(encode_state(to_state_dict(tree), chunk_size=CHUNK_BYTES))

    def snapshot(self, options: SaveOptions) -> MsgpackSave:
        """Return the same with arrays that nobody changes any more."""
        del options
        given = {id(piece.array): piece.array for piece in self._pieces if isinstance(piece, Block)}
        held = {key: np.array(to_host(array)) for key, array in given.items()}
        pieces = (dataclasses.replace(p, array=held[id(p.array)]) if isinstance(p, Block) else p for p in self._pieces)
        return MsgpackSave(list(pieces))

    def write(self, options: SaveOptions, watch: Watch = UNWATCHED) -> None:
        """Write the file, in a bucket with other headers than any earlier one; ``treering.save`` says more."""
        pieces, unique = vary(self._pieces) if needs_nonce(options.path) else (self._pieces, False)
        write_buffers(piece_buffers(pieces), pieces_size(pieces), options, watch, unique=unique)


def find_losses(source: Source, part: Selection, metadata: Mapping[str, Any]) -> Iterator[Loss]:
    """Yield all that a state dict is not: text as keys around arrays, numbers, str, bytes and None."""
    yield from lost_members(metadata)
    yield from lost_containers(part.structure, empty=False)
    yield from lost_leaves(source, part, lambda kind: why_not_stored(kind) if kind.kind in _REFUSED else None)
    yield from lost_names(part.keys, key_texts(part.structure), lambda _: False)
    for key, leaf in zip(part.keys, part.leaves, strict=True):
        value = source.index.values.get(leaf)
        if type(value) is int and not _LEAST <= value < _MOST:
            yield Loss("scalars", key, f"leaf {quoted_key(key)}: an int of more than 64 bits")


def write(source: Source, part: Selection, save: SaveOptions, watch: Watch) -> dict[str, Any]:
    """Write the file; return what is in it by its keys."""
    leaves = describe_source(source, part)
    written = [leaves.whole_of(n) if n in leaves.sources else leaves.values[n] for n in range(len(part.keys))]
    kinds = [source.index.type_of(leaf).kind for leaf in part.leaves]
    state = _nest(part, map(_as_flax_takes_it, kinds, written))
    pieces = Encoder(_adopt, to_host, CHUNK_BYTES, sort_keys=False, small=-1).encode(state)
    MsgpackSave(pieces).write(save, watch)
    return dict(zip(key_texts(part.structure), written, strict=True))


def _adopt(value: object) -> BoxedArray | None:
    return value if isinstance(value, BoxedArray) else None


def _as_flax_takes_it(kind: str, value: Any) -> Any:
    """Return a leaf of the state dict: scalars and long texts are read now, arrays when their turn comes."""
    if not isinstance(value, SourceArray) or kind in ("jax", "numpy", "key"):
        return value
    held = np.asarray(value)
    if kind == "numpy scalar":
        return held[()]
    return held.tobytes().decode("utf-8", "surrogatepass") if kind == "str" else held.tobytes()


def _nest(part: Selection, leaves: Iterable[Any]) -> Any:
    """Return dicts by the texts of keys around the leaves, whatever the containers are."""
    left = iter(leaves)
    root: dict[str, Any] = {}
    levels: list[tuple[Sequence[str], dict[str, Any]]] = [(("",), root)]
    for depth, place, token in walk(part.structure):
        del levels[depth + 1 :]
        names, into = levels[depth]
        if isinstance(token, Container):
            levels.append(([key_text(key) for key in token.keys], into.setdefault(names[place], {})))
        else:
            into.update(zip(names[place : place + token], left, strict=False))
    return root[""]
