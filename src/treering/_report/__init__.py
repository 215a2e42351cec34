"""A checkpoint, a run or a file as one HTML page that needs no network."""
