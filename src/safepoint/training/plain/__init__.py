"""Loops that report each step: `safepoint.session`, and what it shares with Lightning's callback."""
