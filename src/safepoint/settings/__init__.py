"""What a run was asked to do: options, variables and the place for its output."""
