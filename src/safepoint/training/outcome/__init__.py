"""How the ranks ended: the record that each rank writes, and the exit code of the node."""
