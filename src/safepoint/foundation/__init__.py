"""Clock, durable files, units, environment, events: what all packages use. Standard library only."""
