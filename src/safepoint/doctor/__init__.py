"""What a training relies on, looked at before it does: machine, software, folder, object store, deadline.

Promises: nothing is changed and nothing is left behind; nothing is imported that only a training needs; a check that
gets no answer in time says so, so that all of them take some seconds together.
"""
