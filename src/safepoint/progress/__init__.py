"""How far a run is: the record, its file, and the formats that controllers and Prometheus read."""
