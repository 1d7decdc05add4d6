"""A job as values: its specification, its states, and its state after an attempt. No process is started here."""
