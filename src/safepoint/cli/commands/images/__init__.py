"""`safepoint freeze`, `safepoint thaw` and `safepoint images …`: process images of jobs, and of other processes.

The result goes to stdout: lines, or one JSON document with `--json`. Progress goes to stderr.
"""
