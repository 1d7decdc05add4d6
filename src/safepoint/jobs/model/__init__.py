"""A job as values: what it is to do, its states, and what the end of an attempt means. No process is started here."""
