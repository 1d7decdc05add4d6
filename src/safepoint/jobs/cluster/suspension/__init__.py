"""Stops a job so that nothing is lost: requests a save, checks it, stops the job, and reports what is saved."""
