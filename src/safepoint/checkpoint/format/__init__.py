"""A checkpoint as files: manifest, digests, the record of the files that one node holds; verifying and listing
folders."""
