"""Reads the pods of a job: which pods are its own, how they ended, and why they do not run."""
