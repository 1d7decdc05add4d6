"""Jobs: trainings that run in the background, on this machine (`local`) or on a Kubernetes cluster (`cluster`).

Control code: no rank imports it, and it imports no torch.
"""
