"""Requests to S3 and compatible servers; they need only the standard library."""
