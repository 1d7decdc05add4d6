"""Checks what a training needs: machine, software, output folder, object store, grace period.

Promises: the checks change nothing and leave no files behind. They import packages that only a training needs in
another process. Each check has a time limit, and a check that exceeds it is reported.
"""
