"""The memory that ranks share with the keeper (the process that writes snapshots to disk), and how much memory there
is."""
