"""What treering remembers of jax, for tests that change jax."""

import sys


def clear_caches() -> None:
    """Let treering find out anew what it asks jax once."""
    modules = [module for name, module in sys.modules.items() if name.startswith("treering.")]
    clears = [one.cache_clear for module in modules for one in vars(module).values() if hasattr(one, "cache_clear")]
    assert clears
    for clear in clears:
        clear()
