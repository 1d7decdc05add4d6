"""Jobs on this machine: their history, their supervisor, and who may start."""
