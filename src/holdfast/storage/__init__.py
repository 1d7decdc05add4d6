"""Bytes at a place. Empty so far: local folders need no more than `holdfast.foundation.files`."""
