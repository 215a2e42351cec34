"""Leaves directories: one zarr array for each leaf, one index for all prefixes."""
