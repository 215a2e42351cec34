"""A key path that shares its beginning with others, for walks over trees that may be 100,000 levels deep.

Tuples of keys would take memory with the square of the depth.
"""

from __future__ import annotations

Trail = tuple["Trail", str] | None
"""None at the root, else the trail of the container and the key in it."""


def unwound(trail: Trail) -> tuple[str, ...]:
    """Return the key path, outermost part first.

    Example:
        >>> unwound(((None, "a"), "b"))
        ('a', 'b')
    """
    parts: list[str] = []
    while trail is not None:
        trail, part = trail
        parts.append(part)
    return tuple(reversed(parts))
