"""Jobs: what a person wants to have trained, on this machine now, on a cluster by the same Protocol.

Control code: nothing here is imported by a rank, and nothing here imports torch.
"""
