"""How much room a folder has: its file system, the limits that Kubernetes sets for it, and what its files occupy."""
