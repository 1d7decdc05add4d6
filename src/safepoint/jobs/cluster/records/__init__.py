"""The records in the objects of a job: its progress, its submission, where it saves, and the receipt of a
suspension."""
