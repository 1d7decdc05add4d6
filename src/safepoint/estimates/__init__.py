"""Estimates for a run: the pace of its steps, and how often to take snapshots. Pure arithmetic."""
