"""Training loops written by hand: `safepoint.session`."""
