"""Buckets of Google Cloud Storage and Azure, through obstore, an optional package."""
