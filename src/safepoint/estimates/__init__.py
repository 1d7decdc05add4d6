"""Estimates for a run: pace, interval and cost of saves, sizes, and when a disk is full. Pure arithmetic."""
