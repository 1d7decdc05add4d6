"""Fault injection, for Safepoint's own tests and for those who want to see their storage fail before it does."""
