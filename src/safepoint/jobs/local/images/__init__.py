"""Process images of the jobs of this machine: freezes jobs, restores them, and chooses what a job resumes from."""
