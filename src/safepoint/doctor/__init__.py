"""Checks what a training relies on: machine, software, folder, object store, deadline.

Promises: nothing is changed and nothing is left behind; nothing is imported that only a training needs; a check
without an answer in time reports that, so that all checks together take some seconds.
"""
