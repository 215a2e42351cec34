"""Who writes and who reads which box of which leaf: pure functions, no jax, no files."""
