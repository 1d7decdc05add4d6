"""What a rank and its keeper (the process of each node that writes snapshots to disk) send to each other.

channel       the connection: frames of bytes, with file descriptors
codec         frozen dataclasses as JSON, read strictly
messages      every message, in both directions, and the command-line argument of the keeper's process
bounded_dict  a dictionary that drops its oldest entries
"""
