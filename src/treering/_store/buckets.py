"""What users call to reach a bucket with options of their own."""

from treering._store.objects.connect import bucket

__all__ = ["bucket"]
