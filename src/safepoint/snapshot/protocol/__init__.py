"""What a rank and its keeper send to each other, and the memory that they share.

channel        the connection: frames of bytes, with file descriptors
codec          frozen dataclasses as JSON, read strictly
messages       every message, in both directions
memory_layout  how a rank lays out the memory that it shares
plan           the command-line argument of the keeper's process
bounded_dict   a dictionary that forgets its oldest entries
"""
