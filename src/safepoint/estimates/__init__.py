"""Estimates for a run: the pace of its steps, how often to take snapshots, bytes by strategy. Pure arithmetic."""
