"""The memory that ranks and keeper share, and how much of it there is."""
