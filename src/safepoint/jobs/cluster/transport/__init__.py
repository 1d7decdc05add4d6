"""HTTP with the API server of a cluster: requests, streams, and its error answers as exceptions."""
