"""Stops a job so that nothing is lost: a save first, its check, then the stop; and what to report of it."""
