"""The free space of a folder: its file system, the limits that Kubernetes sets for it, and what its files occupy."""
