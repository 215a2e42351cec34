"""Formats of other programs, one module each: what stands there, what is in it, and where its bytes lie."""
