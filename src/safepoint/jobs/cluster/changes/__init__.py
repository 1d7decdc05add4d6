"""Changes of several objects in a fixed order, so that a later command can finish the work of a killed command."""
