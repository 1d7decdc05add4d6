"""Stops a job so that nothing is lost: requests a save, checks the checkpoint, stops the job, reports what is
saved."""
