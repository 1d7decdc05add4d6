"""Loops that report each step: `safepoint.session`, and the code that it shares with Lightning's callback."""
