"""The items of a step: what a loop saves together, and those among them that keep their state to themselves."""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard, runtime_checkable

__all__ = ["Stateful", "saved_items", "stateful_items"]


@runtime_checkable
class Stateful(Protocol):
    """An object that gives its state away and takes it back, such as an iterator over data.

    ``Run.save`` saves what ``get_state()`` returns: a pytree, as for ``treering.save``. ``Run.load`` gives it back to
    ``set_state``.

    Example:
        >>> class Counter:
        ...     position = 0
        ...     def get_state(self):
        ...         return {"position": self.position}
        ...     def set_state(self, state):
        ...         self.position = state["position"]
        >>> isinstance(Counter(), Stateful)
        True
    """

    def get_state(self) -> Any:
        """Return the state: a pytree that later steps of the object do not change."""

    def set_state(self, state: Any, /) -> Any:
        """Go on from a state."""


def stateful_items(tree: Any) -> dict[Any, Stateful]:
    """Return the objects of a tree that give their state away: the values of its dict, or with the key None itself.

    Example:
        >>> stateful_items({"w": 1.5})
        {}
    """
    if _is_stateful(tree):
        return {None: tree}
    if type(tree) is not dict:
        return {}
    return {name: item for name, item in tree.items() if _is_stateful(item)}


def saved_items(tree: Any) -> Any:
    """Return what is saved of a tree: each object that gives its state away is replaced by its state.

    Example:
        >>> saved_items({"w": 1.5, "count": 3})
        {'w': 1.5, 'count': 3}
    """
    found = stateful_items(tree)
    if None in found:
        return found[None].get_state()
    return {**tree, **{name: item.get_state() for name, item in found.items()}} if found else tree


def _is_stateful(item: object) -> TypeGuard[Stateful]:
    # A class has the methods too, but only of its instances.
    return isinstance(item, Stateful) and not isinstance(item, type)
