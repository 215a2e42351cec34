"""flax's msgpack wire: written as pieces, read by a scanner that trusts no header. Pure, over buffers."""
