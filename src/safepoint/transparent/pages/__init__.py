"""Stores the memory pages of frozen processes: zero, LZ4, raw, or equal to a page of an older image.

Promises: a read returns byte for byte what was written, or raises `ImageError`. Memory is bounded, whatever the size
of the processes. Not promised: that the pages belong to processes that can be restored.
"""
