"""Helpers: short-lived Kubernetes Jobs, whose pod mounts claims and runs one command of Safepoint."""
