"""The text that the demo learns: the help topics that ship with CPython, cut into shuffled windows.

The order of the windows is fixed by a seed, so a position (one integer) is all that a checkpoint has to keep.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import numpy as np

from treering.errors import NotFoundError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A text as small integers, and the order in which its windows are read."""

    alphabet: str
    """Every character that occurs, sorted; a token is an index into it."""
    tokens: np.ndarray
    """The whole text, uint8 of shape (characters,)."""
    starts: np.ndarray
    """Where each window begins, shuffled; int64 of shape (windows,)."""
    window: int
    """Characters a window holds, one more than the model reads: the last one is only predicted."""


def load_corpus(*, context: int, seed: int) -> Corpus:
    """Read CPython's help topics and cut them into windows of ``context + 1`` characters.

    Raises ``NotFoundError`` where the Python installation came without ``pydoc_data``.

    Example:
        >>> corpus = load_corpus(context=64, seed=0)
        >>> len(corpus.tokens) > 100_000, corpus.window
        (True, 65)
    """
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as cause:
        raise NotFoundError(
            "this Python came without its help topics (pydoc_data), the text that the demo learns",
            hint="install the full standard library, or run the demo with another Python",
        ) from cause
    text = "\n".join(topics[name] for name in sorted(topics))
    alphabet = "".join(sorted(set(text)))
    token_of = {character: token for token, character in enumerate(alphabet)}
    tokens = np.fromiter(map(token_of.__getitem__, text), dtype=np.uint8, count=len(text))
    starts = np.arange(0, len(tokens) - context - 1, context, dtype=np.int64)
    np.random.default_rng(seed).shuffle(starts)
    return Corpus(alphabet=alphabet, tokens=tokens, starts=starts, window=context + 1)


def batch_at(corpus: Corpus, position: int, size: int) -> np.ndarray:
    """Take the ``size`` windows at ``position``, an int32 array of shape (size, window); wraps at the end.

    Example:
        >>> corpus = load_corpus(context=64, seed=0)
        >>> batch_at(corpus, 8, 4).shape
        (4, 65)
    """
    turn = np.arange(position, position + size) % len(corpus.starts)
    return corpus.tokens[corpus.starts[turn][:, None] + np.arange(corpus.window)].astype(np.int32)


class Windows:
    """Reads batch after batch; it can be saved with the state that learns from it, and goes on where it stood.

    Args:
        corpus: what it reads.
        size: windows in a batch.

    Example:
        >>> windows = Windows(load_corpus(context=64, seed=0), 4)
        >>> _ = next(windows)
        >>> windows.get_state(), next(windows).shape
        ({'position': 4}, (4, 65))
    """

    def __init__(self, corpus: Corpus, size: int) -> None:
        self._corpus = corpus
        self._size = size
        self._position = 0

    def __iter__(self) -> Windows:
        return self

    def __next__(self) -> np.ndarray:
        batch = self.peek()
        self._position += self._size
        return batch

    def peek(self) -> np.ndarray:
        """Return the next batch without moving on."""
        return batch_at(self._corpus, self._position, self._size)

    def get_state(self) -> dict[str, int]:
        """Say where it stands."""
        return {"position": self._position}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to where another one stood."""
        self._position = int(state["position"])
