"""The settings of a run: options, variables and the place for its output."""
