"""Watches of the cluster: the API server sends each change of an object, so that Safepoint need not poll."""
