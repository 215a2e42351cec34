"""A state dict that was read -> the target's structure, checked and placed as asked."""

from __future__ import annotations

from typing import Any

from treering._tree.restore import from_state_dict
from treering._tree.state_dict import require_match
from treering._wire.place import place


def restored(target: Any, state: Any, *, strict: bool, to_jax: bool, shardings: Any) -> Any:
    """Return ``target``'s structure with the leaves of ``state``, whose containers may change on the way.

    ``shardings`` implies ``to_jax``.
    """
    if strict:
        require_match(target, state)
    if to_jax or shardings is not None:
        state = place(state, target, shardings)
    return from_state_dict(target, state)
