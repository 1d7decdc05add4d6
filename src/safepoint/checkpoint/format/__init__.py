"""What a checkpoint is, as files: manifest, digests, the part of one node; how a folder is verified and listed."""
