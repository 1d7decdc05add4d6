"""The context of one rank: its settings, connections, progress and end."""
