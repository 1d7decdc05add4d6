"""Reads the pickles of a checkpoint, which an attacker may have written, within limits."""
