"""Jobs: trainings that run in the background on this machine.

Control code: no rank imports it, and it imports no torch.
"""
