"""Value types: keys, dtypes, sizes for people. No I/O, no jax."""
