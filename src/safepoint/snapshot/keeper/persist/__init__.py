"""From a snapshot in memory to a committed checkpoint."""
