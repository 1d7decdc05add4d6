"""Estimates for a run: its pace, how often to save, what that costs, and bytes by strategy. Pure arithmetic."""
