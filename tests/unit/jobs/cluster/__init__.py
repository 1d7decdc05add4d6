"""Tests of safepoint.jobs.cluster."""
