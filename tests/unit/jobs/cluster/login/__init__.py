"""Tests of safepoint.jobs.cluster.login."""
