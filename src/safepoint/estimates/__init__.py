"""Estimates for a run: the pace of its steps, how often to take snapshots, when a disk is full. Pure arithmetic."""
