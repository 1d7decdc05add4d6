"""What one rank knows of its run: its context, and the services whose state changes."""
