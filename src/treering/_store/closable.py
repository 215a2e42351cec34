"""What a ``with`` block closes."""

from __future__ import annotations

import abc
from typing import Self


class Closable(abc.ABC):
    """What a ``with`` block closes at its end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of it. May be called twice."""
