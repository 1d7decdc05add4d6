"""What commands and pages both say about jobs."""
