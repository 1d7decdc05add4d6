"""The position of a loop in its data, and how a resume restores it."""
