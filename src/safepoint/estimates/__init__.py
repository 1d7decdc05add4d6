"""Estimates for a run: its pace, how often to take snapshots and checkpoints, and what they cost. Pure arithmetic."""
