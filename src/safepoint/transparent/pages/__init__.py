"""Stores the memory pages of frozen processes: zero, LZ4, raw, or equal to a page of an older image.

Promises: what is read back is byte for byte what was written, or there is an `ImageError`. Memory is bounded,
whatever the size of the processes. Not promised: that the pages belong to processes that can be restored;
`transparent.criu` tries that.
"""
