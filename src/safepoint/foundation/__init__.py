"""The ground everything stands on: clock, durable files, units, environment, events. Standard library only."""
