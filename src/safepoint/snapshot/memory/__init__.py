"""The memory that ranks share with the keeper (the process that writes snapshots to disk), and its limits."""
