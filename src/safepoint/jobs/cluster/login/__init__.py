"""How a command logs in to a cluster."""
