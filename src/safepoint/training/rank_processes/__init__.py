"""The processes of a node's ranks: how they come into being, and how the launcher notices that they have ended."""
