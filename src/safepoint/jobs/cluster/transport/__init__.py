"""HTTP with the API server of a cluster: requests, streams, and exceptions for its error answers."""
