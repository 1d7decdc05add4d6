"""The progress of a run: the record, its file, and the formats that controllers and Prometheus read."""
