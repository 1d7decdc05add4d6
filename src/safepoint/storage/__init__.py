"""Bytes at a place: where checkpoints live (`location`), what a place can do (`store`), folders and object stores."""
