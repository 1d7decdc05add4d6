"""The records in the objects of a job: its progress, its submission, its storage location, and its receipt."""
