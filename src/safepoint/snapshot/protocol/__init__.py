"""What a rank and its keeper (the process of each node that writes snapshots to disk) send to each other.

channel       how a rank finds its keeper, and connects to it (the connection itself: `safepoint.foundation.channels`)
messages      every message, in both directions, and the command-line argument of the keeper's process
bounded_dict  a dictionary that drops its oldest entries
"""
