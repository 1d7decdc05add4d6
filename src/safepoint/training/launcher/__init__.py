"""`safepoint run` on one node: starts the ranks, supervises them, and reports how they ended."""
