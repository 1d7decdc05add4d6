"""Tests of safepoint.cli.claims."""
