"""Helpers: short-lived Kubernetes Jobs, whose pod mounts claims (volumes) and runs one command of Safepoint."""
