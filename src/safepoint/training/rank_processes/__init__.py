"""The processes of a node's ranks: how they are created, and how the launcher notices that they have ended."""
