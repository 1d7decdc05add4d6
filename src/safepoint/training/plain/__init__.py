"""Hand-written training loops: `safepoint.session`."""
