"""How the ranks ended: the record that each rank writes, the launcher's folder, and the exit code of the node."""
