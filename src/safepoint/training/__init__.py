"""Inside the training process: session, termination, vote, resume, progress; and the launcher of the ranks.

`python -m safepoint.training SCRIPT` is one rank. This module imports nothing heavy, because the signal
handlers must be in place before torch is.
"""
