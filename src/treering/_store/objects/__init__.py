"""Places in a bucket: S3, GCS, Azure, and what speaks like one of them."""
