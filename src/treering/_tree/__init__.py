"""Trees, leaves and state dicts: the lowest floor that may import jax."""
