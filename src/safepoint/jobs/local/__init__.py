"""Jobs on this machine: the history, the supervisor of a job, and the slots that jobs share."""
