"""Checks what a training needs: machine, software, output folder, object store, grace period.

Promises: the checks change nothing and leave no files behind. Packages that only a training needs are imported in
another process. Each check that may block has a time limit, and a check that exceeds its limit is reported.
"""
