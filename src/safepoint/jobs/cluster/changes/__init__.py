"""Changes of several objects in a fixed order, so that a command that is killed is finished by a later one."""
