"""Programs of tests that begin as copies of one process which has imported their packages.

A program of a test imports torch and transformers in each of its ranks (training processes), which is most of the
time that the test takes. So each test process starts one template: it imports, computes nothing, and copies itself on
request. `copied_program` asks for copies, `template` is the process, `environment_at_import` decides whether a copy
would be as a new process, and `title` gives a copy the command line of the program.

A program that cannot be copied is started as usual. Tests of starts, imports and environments ask for that themselves
(`fresh`). With SAFEPOINT_TEST_TEMPLATE=0, nothing is copied.
"""
