"""Estimates for a run: pace, how often to save, what that costs, sizes, when a disk is full. Pure arithmetic."""
