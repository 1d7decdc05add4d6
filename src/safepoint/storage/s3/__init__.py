"""Requests to S3 and compatible servers; they need nothing but the standard library."""
