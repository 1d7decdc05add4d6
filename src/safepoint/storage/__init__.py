"""Bytes at a location: `location`, the `store` Protocol, and its implementations for folders and object stores."""
