"""A checkpoint in an object store: published, fetched, and uploaded by a process of its own."""
