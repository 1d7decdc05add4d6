"""Inside the training process: rank, vote, saves and resume; and the launcher of the ranks.

`python -m safepoint.training SCRIPT` is one rank. This module imports nothing heavy, because the signal
handlers must be in place before torch is.
"""
