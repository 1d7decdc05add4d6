"""Fault injection, for Safepoint's own tests and for users who want to test a training with failing storage."""
