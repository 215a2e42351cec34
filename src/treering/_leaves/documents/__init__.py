"""The index and the records of a leaves directory, as documents and back."""
