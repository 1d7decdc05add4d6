"""Stops a job so that nothing is lost: requests and checks a save, stops the job, and reports what is saved."""
