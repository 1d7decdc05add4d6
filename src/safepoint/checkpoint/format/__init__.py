"""The files of a checkpoint: the manifest, the digests, the record of the files that one node holds. This package
also verifies and lists folders."""
