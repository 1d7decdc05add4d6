"""Where a loop stands in its data, and how it returns there."""
