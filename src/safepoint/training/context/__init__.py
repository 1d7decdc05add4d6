"""What one rank knows of its run: settings, signals, the connection to the keeper, uploads."""
