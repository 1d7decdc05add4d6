"""Checkpoints in an object store: the claim, the commit, publishing, fetching, and the uploader's process."""
