"""Checks before a job is created: the objects that the job needs on the cluster, and the values of its options."""
