"""The files of a checkpoint: the manifest, the digests, the record of the files that one node holds. Also verifies and
lists folders."""
