"""The tools for testing are tested."""
