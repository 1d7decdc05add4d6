"""Locks on files: what the kernel offers, and the leases of those who read a checkpoint."""
