"""Wire codecs over buffers: bytes in, values out. No files, no jax."""
