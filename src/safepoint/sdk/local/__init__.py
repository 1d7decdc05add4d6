"""Runs the jobs of the SDK on this machine."""
