"""A checkpoint as files: manifest, digests, the part of one node; verifying and listing folders."""
