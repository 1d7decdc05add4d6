"""The settings of a run: options, variables, and the location of its output."""
