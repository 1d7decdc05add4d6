"""Jobs on this machine: the history, the supervisor of a job, and the slots (CPU cores and GPUs) that jobs share."""
