"""The work of the commands on checkpoints: list, copy, export, compare, repair and adopt."""
