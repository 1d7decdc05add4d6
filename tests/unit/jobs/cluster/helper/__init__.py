"""Tests of safepoint.jobs.cluster.helper."""
