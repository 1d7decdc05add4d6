"""A rank's side of the keeper: the connection, the memory it lends, and the snapshots it hands over."""
