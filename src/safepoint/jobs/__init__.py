"""Jobs: trainings that run in the background, on this machine (`local`) or on a Kubernetes cluster (`cluster`).

Ranks do not import this package, and it does not import torch.
"""
