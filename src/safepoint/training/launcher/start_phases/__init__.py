"""The phases of a start of the ranks: how long they took, and what a slow start waits for."""
