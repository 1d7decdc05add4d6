"""Checks what a training needs: machine, software, output folder, object store, grace period.

Promises: the checks change nothing and leave no files behind. They import no package that only a training needs. A
check that takes too long is reported as such, so that all checks together take some seconds.
"""
