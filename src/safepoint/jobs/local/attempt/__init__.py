"""One attempt of a job: its launchers, packages and logs, and the reports of its ranks."""
