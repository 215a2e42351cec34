"""The chunk files of leaves: planned, written, read and checked."""
