"""The differences between the supported releases of each framework: one module for each framework.

The code examines the features of a release, such as a method or a parameter. It does not compare the number of the
release, because distributors backport features. A table at the top of each module names the releases that have a
difference. When Safepoint no longer supports these releases, the code for the difference can be deleted. The module
`releases` names the oldest and the newest release that the tests ran with.
"""
