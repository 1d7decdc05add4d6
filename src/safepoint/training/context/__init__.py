"""What one rank knows of its run: an immutable context, and the services whose state changes."""
