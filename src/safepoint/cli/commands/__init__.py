"""One module for each command, or group of commands, that a person types."""
