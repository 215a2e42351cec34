"""Key maps: which leaves of one tree become which leaves of another, as a value. Pure, without jax and numpy."""
