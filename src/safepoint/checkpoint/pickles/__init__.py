"""Reads the pickles of a checkpoint within limits, because an attacker may have written them."""
